# SPDX-License-Identifier: Apache-2.0
# Reads the folders in which ONE FILE = ONE THING and writes what the sources include:
#   gen/dtypes.inc            FV_DTYPE(name)              src/dtypes/*.h
#   gen/dtype_files.inc       #include "dtypes/NAME.h"    the same files
#   gen/variants.inc          FV_VARIANT(name)            src/variants/*.h
#   gen/variant_hooks.inc     FV_VARIANT_HOOK(name, HOOK) each hook that a variant's text has
#   gen/variant_files.inc     FV_VARIANT_NAME and FV_HAS_HOOK defined, then FV_VARIANT_OPEN, the text, FV_VARIANT_CLOSE included
#   gen/variant_texts.inc     fv__text_NAME[]             their texts
#   gen/isas.inc              FV_ISA(name)                src/cpu/isa/*.h that fit the target's architecture
#   gen/isa_flags.inc         { "level", "its flags" },   the same levels
#   gen/cpu_kernels.inc       FV_CPU_KERNEL(name)         src/cpu/kernels/*.c, likewise
#   gen/cuda_kernels.inc      FV_CUDA_KERNEL(name)        src/cuda/kernels/*.cu
#   gen/{cuda,cpu}_texts.inc  arrays, and gen/{cuda,cpu}_table.inc: { "file name", array }, lines
# Every src/cpu/*_tmpl.c is compiled once per level, with the flags of the level's ` * cflags:` line (FV_ISA_SOURCES). A kernel
# file has the same two lines. A file that is added, changed or removed runs this again; what it writes changes only if its
# text does, and what it no longer writes is deleted.
set(FV_GEN ${CMAKE_BINARY_DIR}/gen)
file(MAKE_DIRECTORY ${FV_GEN})
set(FV_GEN_WRITTEN "")

function(fv_write name text)
  set(old "")
  if(EXISTS ${FV_GEN}/${name})
    file(READ ${FV_GEN}/${name} old)
  endif()
  if(NOT EXISTS ${FV_GEN}/${name} OR NOT old STREQUAL text)
    file(WRITE ${FV_GEN}/${name} "${text}")
  endif()
  set(FV_GEN_WRITTEN ${FV_GEN_WRITTEN} ${FV_GEN}/${name} PARENT_SCOPE)
endfunction()

# Files that match, sorted; they are watched for changes.
macro(fv_glob out)
  file(GLOB ${out} CONFIGURE_DEPENDS ${ARGN})
  list(SORT ${out})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${${out}})
endmacro()

# `MACRO(name)` lines.
function(fv_names out macro)
  set(text "")
  foreach(file ${ARGN})
    get_filename_component(name ${file} NAME_WE)
    string(APPEND text "${macro}(${name})\n")
  endforeach()
  set(${out} "${text}" PARENT_SCOPE)
endfunction()

# A file's bytes as a C array, 0 at the end.
function(fv_array out file array)
  file(READ ${file} hex HEX)
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
  set(${out} "static const char ${array}[] = {${bytes}0};\n" PARENT_SCOPE)
endfunction()

# gen/KIND_texts.inc and gen/KIND_table.inc; files are known by their name.
function(fv_embed kind)
  set(texts "/* generated from src/${kind} */\n")
  set(table "")
  foreach(file ${ARGN})
    get_filename_component(name ${file} NAME)
    string(MAKE_C_IDENTIFIER ${name} id)
    fv_array(array ${file} fv__${kind}_text_${id})
    string(APPEND texts "${array}")
    string(APPEND table "    { \"${name}\", fv__${kind}_text_${id} },\n")
  endforeach()
  fv_write(${kind}_texts.inc "${texts}")
  fv_write(${kind}_table.inc "${table}")
  set(FV_GEN_WRITTEN ${FV_GEN_WRITTEN} PARENT_SCOPE)
endfunction()

# The ` * arch:` and ` * cflags:` lines of a file: sets `fits` and `flags`.
function(fv_arch file)
  file(STRINGS ${file} arch REGEX "^ \\* arch:")
  file(STRINGS ${file} flags REGEX "^ \\* cflags:")
  string(REGEX REPLACE "^ \\* arch: *([^ ]*) *$" "\\1" arch "${arch}")
  string(REGEX REPLACE "^ \\* cflags: *" "" flags "${flags}")
  string(STRIP "${flags}" flags)
  if(arch STREQUAL "any" OR CMAKE_SYSTEM_PROCESSOR MATCHES "^(${arch})$")
    set(fits TRUE PARENT_SCOPE)
  else()
    set(fits FALSE PARENT_SCOPE)
  endif()
  set(flags "${flags}" PARENT_SCOPE)
endfunction()

# Element types and variants.
fv_glob(files ${CMAKE_SOURCE_DIR}/src/dtypes/*.h)
fv_names(text FV_DTYPE ${files})
fv_write(dtypes.inc "${text}")
set(text "")
foreach(file ${files})
  get_filename_component(name ${file} NAME)
  string(APPEND text "#include \"dtypes/${name}\"\n")
endforeach()
fv_write(dtype_files.inc "${text}")

fv_glob(files ${CMAKE_SOURCE_DIR}/src/variants/*.h)
fv_names(text FV_VARIANT ${files})
fv_write(variants.inc "${text}")
set(hooks "")
set(includes "")
set(texts "/* generated from src/variants */\n")
foreach(file ${files})
  get_filename_component(name ${file} NAME_WE)
  file(READ ${file} text)
  string(APPEND includes "#define FV_VARIANT_NAME ${name}\n")
  foreach(hook SCORE VISIBLE SINK QUERY KEY VALUE OUTPUT WEIGHT KEY_SUM ROW_MAX)
    if(text MATCHES "\nFV_${hook}[ \n\r\t]*{")
      string(APPEND hooks "FV_VARIANT_HOOK(${name}, ${hook})\n")
      string(APPEND includes "#define FV_HAS_${hook}\n")
    endif()
  endforeach()
  string(APPEND includes "#include FV_VARIANT_OPEN\n#include \"variants/${name}.h\"\n#include FV_VARIANT_CLOSE\n")
  fv_array(array ${file} fv__text_${name})
  string(APPEND texts "${array}")
endforeach()
fv_write(variant_hooks.inc "${hooks}")
fv_write(variant_files.inc "${includes}")
fv_write(variant_texts.inc "${texts}")

# Texts for the run-time compilers.
fv_glob(files ${CMAKE_SOURCE_DIR}/src/cuda/kernels/*.cu ${CMAKE_SOURCE_DIR}/src/cuda/*.cuh)
fv_embed(cuda ${files})
fv_glob(files ${CMAKE_SOURCE_DIR}/src/cpu/hooks_*.h ${CMAKE_SOURCE_DIR}/src/cpu/spec_*.h ${CMAKE_SOURCE_DIR}/src/cpu/vocabulary.h
        ${CMAKE_SOURCE_DIR}/src/cpu/isa/*.h)
fv_embed(cpu ${files})

# CPU levels: one unit per template and level.
fv_glob(isa_files ${CMAKE_SOURCE_DIR}/src/cpu/isa/*.h)
fv_glob(template_files ${CMAKE_SOURCE_DIR}/src/cpu/*_tmpl.c)
set(isas "")
set(FV_ISA_SOURCES "")
set(isa_flags "")
set(FV_ISAS "")                         # and FV_ISA_FLAGS_<level>, gen/probe_<level>.c: for checksimd
foreach(file ${isa_files})
  get_filename_component(isa ${file} NAME_WE)
  fv_arch(${file})
  if(FV_EMULATE_TILES AND isa STREQUAL "amx")
    set(flags "-DV_EMULATE_TILES -mavx2 -mfma -mf16c -Wno-psabi")
  endif()
  if(NOT fits OR (FV_EXCLUDE AND "gen/attend_tmpl_${isa}.c" MATCHES "${FV_EXCLUDE}"))
    continue()                          # a level whose sources are left out (FV_EXCLUDE) is none
  endif()
  string(APPEND isas "FV_ISA(${isa})\n")
  string(APPEND isa_flags "    { \"${isa}\", \"${flags}\" },\n")
  list(APPEND FV_ISAS ${isa})
  set(FV_ISA_FLAGS_${isa} "${flags}")
  fv_write(probe_${isa}.c
           "#define FV_ISA_NAME ${isa}\n#define FV_ISA_HEADER \"cpu/isa/${isa}.h\"\n#include \"simd/probe_tmpl.c\"\n")
  foreach(template ${template_files})
    get_filename_component(base ${template} NAME_WE)
    fv_write(${base}_${isa}.c
             "#define FV_ISA_NAME ${isa}\n#define FV_ISA_HEADER \"cpu/isa/${isa}.h\"\n#include \"cpu/${base}.c\"\n")
    set_source_files_properties(${FV_GEN}/${base}_${isa}.c PROPERTIES COMPILE_FLAGS "${flags}")
    list(APPEND FV_ISA_SOURCES ${FV_GEN}/${base}_${isa}.c)
  endforeach()
endforeach()
fv_write(isas.inc "${isas}")
fv_write(isa_flags.inc "${isa_flags}")

# Hand-written kernels. A .cu file's host half is C, its device half is text.
set(kernels "")
set(FV_KERNEL_SOURCES "")
fv_glob(files ${CMAKE_SOURCE_DIR}/src/cpu/kernels/*.c)
foreach(file ${files})
  get_filename_component(name ${file} NAME_WE)
  fv_arch(${file})
  if(fits)
    string(APPEND kernels "FV_CPU_KERNEL(${name})\n")
    set_source_files_properties(${file} PROPERTIES COMPILE_FLAGS "${flags}")
    list(APPEND FV_KERNEL_SOURCES ${file})
  endif()
endforeach()
fv_write(cpu_kernels.inc "${kernels}")

fv_glob(files ${CMAKE_SOURCE_DIR}/src/cuda/kernels/*.cu)
fv_names(text FV_CUDA_KERNEL ${files})
fv_write(cuda_kernels.inc "${text}")
set_source_files_properties(${files} PROPERTIES LANGUAGE C COMPILE_FLAGS "-x c")
list(APPEND FV_KERNEL_SOURCES ${files})

# What an earlier run left and this one did not write.
file(GLOB stale ${FV_GEN}/*)
list(REMOVE_ITEM stale ${FV_GEN_WRITTEN})
if(stale)
  file(REMOVE ${stale})
endif()
