# A backend library: one C symbol visible (exl3_get_backend), no undefined ones, installed into the package.

# exl3_backend(NAME target): settings every backend's shared library shares; call it after add_library(exl3_NAME SHARED ...).
# EXL3_EXPORTS: another version script than exports.map.
function(exl3_backend name)
  set(target exl3_${name})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/cpp/include ${PROJECT_SOURCE_DIR}/cpp)
  target_compile_definitions(${target} PRIVATE EXL3_VERSION="${PROJECT_VERSION}")
  exl3_warnings(${target})
  if(UNIX AND NOT APPLE)
    set(exports ${PROJECT_SOURCE_DIR}/cmake/exports.map)
    if(EXL3_EXPORTS)
      set(exports ${EXL3_EXPORTS})
    endif()
    # static libraries inside (the C++ library, cudart) must not leak symbols into the process
    target_link_options(${target} PRIVATE -Wl,-z,defs -Wl,--version-script=${exports} -Wl,--as-needed)
    set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${exports})
  endif()
  install(TARGETS ${target} RUNTIME DESTINATION . COMPONENT runtime LIBRARY DESTINATION . COMPONENT runtime)
endfunction()

# A finished library from EXL3_PREBUILT.
function(exl3_prebuilt name)
  set(file ${CMAKE_SHARED_LIBRARY_PREFIX}exl3_${name}${CMAKE_SHARED_LIBRARY_SUFFIX})
  if(NOT EXISTS ${EXL3_PREBUILT}/${file})
    message(FATAL_ERROR "EXL3_PREBUILT=${EXL3_PREBUILT} has no ${file}")
  endif()
  install(PROGRAMS ${EXL3_PREBUILT}/${file} DESTINATION . COMPONENT runtime)
endfunction()
