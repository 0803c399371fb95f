# Device code for AMD cards with a plain clang: no ROCm, no HIP headers, no HIP language of CMake.
#   exl3_rocm_archs(ARCHS TEXT FLOOR)             what EXL3_ROCM_ARCHS stands for
#   exl3_rocm_fatbin(OUT SOURCE file.hip ARCHS a b [FLAGS ...])  commands that make OUT, one bundle of a code object for each architecture
include_guard()

set(EXL3_ROCM_family gfx10-3-generic gfx11-generic gfx12-generic)
set(EXL3_ROCM_quick gfx1030 gfx1100 gfx1151 gfx1201)
set(EXL3_ROCM_all gfx1030 gfx1031 gfx1032 gfx1033 gfx1034 gfx1035 gfx1036 gfx1100 gfx1101 gfx1102 gfx1103 gfx1150 gfx1151 gfx1152 gfx1153 gfx1200 gfx1201)

# EXL3_ROCM_ARCHS (CMake or environment): a list of gfx names and of the sets family (default), quick and all. floor: the oldest ROCm that
# loads the result.
function(exl3_rocm_archs archs_out text_out floor_out)
  set(wanted "${EXL3_ROCM_ARCHS}")
  if(NOT wanted)
    set(wanted "$ENV{EXL3_ROCM_ARCHS}")
  endif()
  if(NOT wanted)
    set(wanted family)
  endif()
  string(REGEX REPLACE "[ ,]+" ";" wanted "${wanted}")
  set(archs "")
  foreach(name IN LISTS wanted)
    if(name MATCHES "^(family|quick|all)$")
      list(APPEND archs ${EXL3_ROCM_${name}})
    else()
      list(APPEND archs "${name}")
    endif()
  endforeach()
  set(floor 602)
  foreach(arch IN LISTS archs)
    if(arch MATCHES "^gfx(9|8|7|6)")
      message(FATAL_ERROR "EXL3_ROCM_ARCHS: ${arch} runs waves of 64 lanes; exl3's AMD kernels are for RDNA2 and newer (gfx103x, gfx11xx, gfx12xx)")
    elseif(NOT arch MATCHES "^gfx(103[0-6]|110[0-3]|115[0-3]|120[01]|10-3-generic|11-generic|12-generic)$")
      message(FATAL_ERROR "EXL3_ROCM_ARCHS: '${arch}' is none of family, quick, all, gfx1030-1036, gfx1100-1103, gfx1150-1153, gfx1200-1201, "
                          "gfx10-3-generic, gfx11-generic, gfx12-generic")
    endif()
    if(arch MATCHES "generic$")
      set(floor 604)
    endif()
  endforeach()
  list(REMOVE_DUPLICATES archs)
  string(REPLACE ";" " " text "${archs}")
  set(${archs_out} "${archs}" PARENT_SCOPE)
  set(${text_out} "${text}" PARENT_SCOPE)
  set(${floor_out} ${floor} PARENT_SCOPE)
endfunction()

# The compiler, which is tried on every architecture given, and its bundler.
function(exl3_rocm_compiler)
  find_program(EXL3_HIP_CLANG NAMES clang++-22 clang++-23 amdclang++ clang++-21 clang++-20 clang++-19 clang++ PATHS /opt/rocm/llvm/bin /opt/rocm/bin
               DOC "clang++ for AMD device code")
  set(cure "apt-get install clang-22 lld-22 llvm-22 clang-tools-22, or -DEXL3_HIP_CLANG=... (ROCm's amdclang++ will do)")
  if(NOT EXL3_HIP_CLANG)
    message(FATAL_ERROR "no clang++ for AMD device code: ${cure}")
  endif()
  set(clang ${EXL3_HIP_CLANG})
  execute_process(COMMAND ${clang} -dumpversion OUTPUT_VARIABLE version OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
  if(failed)
    unset(EXL3_HIP_CLANG CACHE) # the next configuration looks again
    message(FATAL_ERROR "${clang} does not run (${failed}): ${cure}")
  endif()
  set(probe ${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/probe)
  file(WRITE ${probe}.hip "__attribute__((global)) void nothing() {}\n")
  foreach(arch IN LISTS ARGN)
    execute_process(
      COMMAND ${clang} -x hip --offload-arch=${arch} --cuda-device-only --no-gpu-bundle-output -nogpulib -nogpuinc -c ${probe}.hip -o ${probe}.co
      RESULT_VARIABLE failed ERROR_VARIABLE said OUTPUT_QUIET)
    if(failed)
      string(REGEX MATCH "error: [^\n]*" said "${said}") # the first of them
      unset(EXL3_HIP_CLANG CACHE) # the next configuration looks again
      message(FATAL_ERROR "${clang} ${version} can't compile for ${arch} (${said}): ${cure}")
    endif()
  endforeach()
  execute_process(COMMAND ${EXL3_HIP_CLANG} -print-prog-name=clang-offload-bundler OUTPUT_VARIABLE beside OUTPUT_STRIP_TRAILING_WHITESPACE)
  string(REGEX MATCH "^[0-9]+" major "${version}")
  find_program(EXL3_HIP_BUNDLER NAMES "${beside}" clang-offload-bundler-${major} clang-offload-bundler PATHS /opt/rocm/llvm/bin)
  if(NOT EXL3_HIP_BUNDLER)
    message(FATAL_ERROR "no clang-offload-bundler of clang ${version}: apt-get install clang-tools-${major}")
  endif()
  set(EXL3_HIP_CLANG_VERSION ${version} PARENT_SCOPE)
endfunction()

function(exl3_rocm_fatbin out)
  cmake_parse_arguments(A "" "SOURCE" "ARCHS;FLAGS" ${ARGN})
  set(compression -compress -compression-level=19)
  if("$ENV{EXLLAMA_EXT_COMPRESS}" STREQUAL "0")
    set(compression "")
  endif()
  set(objects "")
  set(inputs -input=/dev/null)
  set(targets host-x86_64-unknown-linux-gnu-)
  foreach(arch IN LISTS A_ARCHS)
    set(object ${CMAKE_CURRENT_BINARY_DIR}/kernels.${arch}.co)
    set(version 5) # loads in ROCm 6.2 and later; generic targets need 6 and ROCm 6.4
    if(arch MATCHES "generic$")
      set(version 6)
    endif()
    add_custom_command(
      OUTPUT ${object}
      COMMAND ${EXL3_HIP_CLANG} -x hip --offload-arch=${arch} --cuda-device-only --no-gpu-bundle-output -nogpulib -nogpuinc
              -mcode-object-version=${version} -O3 -std=c++17 -Wall ${A_FLAGS}
              # -MD and -MF are ignored in device-only mode
              -Xclang -dependency-file -Xclang ${object}.d -Xclang -MT -Xclang ${object} -c ${A_SOURCE} -o ${object}
      DEPENDS ${A_SOURCE}
      DEPFILE ${object}.d
      VERBATIM
      COMMENT "AMD device code for ${arch}")
    list(APPEND objects ${object})
    list(APPEND inputs -input=${object})
    string(APPEND targets ",hipv4-amdgcn-amd-amdhsa--${arch}")
  endforeach()
  add_custom_command(
    OUTPUT ${out}
    # format 2 is what ROCm 6.2 and 6.3 read, too
    COMMAND ${CMAKE_COMMAND} -E env COMPRESSED_BUNDLE_FORMAT_VERSION=2 ${EXL3_HIP_BUNDLER} -type=o -bundle-align=4096 -targets=${targets} ${inputs}
            ${compression} -output=${out}
    DEPENDS ${objects}
    VERBATIM
    COMMENT "AMD code bundle")
endfunction()
