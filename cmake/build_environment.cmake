# What the environment says about a build: backends, parallel jobs, compiler cache. Included before project().
#   EXL3_BACKENDS, EXL3_PREBUILT  stand in for the CMake options of the same name (`pip install` passes no options by itself)
#   MAX_JOBS                      most compilers at a time (Ninja)
#   TORCH_NO_COMPILER_WRAPPER     set: no sccache or ccache in front of the compilers, which is otherwise used when on the path

# A variable that CMake was not told: from the environment, else the default. It stays out of the cache, so that the next configuration of
# the same folder reads the environment again.
macro(exl3_from_environment name default)
  if(NOT DEFINED ${name})
    if(NOT "$ENV{${name}}" STREQUAL "")
      set(${name} "$ENV{${name}}")
    else()
      set(${name} "${default}")
    endif()
  endif()
endmacro()

if(NOT "$ENV{MAX_JOBS}" STREQUAL "")
  if(NOT "$ENV{MAX_JOBS}" MATCHES "^[1-9][0-9]*$")
    message(FATAL_ERROR "MAX_JOBS='$ENV{MAX_JOBS}': give a whole number above 0, or unset it")
  endif()
  set_property(GLOBAL APPEND PROPERTY JOB_POOLS exl3_compile=$ENV{MAX_JOBS})
  set(CMAKE_JOB_POOL_COMPILE exl3_compile)
endif()

if("$ENV{TORCH_NO_COMPILER_WRAPPER}" STREQUAL "")
  find_program(EXL3_COMPILER_CACHE NAMES sccache ccache)
  mark_as_advanced(EXL3_COMPILER_CACHE)
  if(EXL3_COMPILER_CACHE)
    foreach(language C CXX CUDA)
      if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
        set(CMAKE_${language}_COMPILER_LAUNCHER ${EXL3_COMPILER_CACHE})
      endif()
    endforeach()
    message(STATUS "compiler cache: ${EXL3_COMPILER_CACHE}")
  endif()
endif()
