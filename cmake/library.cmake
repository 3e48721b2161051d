# SPDX-License-Identifier: Apache-2.0
# The library, shared and static, from one set of objects. Sources are found, not listed.
file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/*.c ${CMAKE_SOURCE_DIR}/src/cpu/*.c
     ${CMAKE_SOURCE_DIR}/src/cuda/*.c ${CMAKE_SOURCE_DIR}/src/jit/*.c)
list(FILTER sources EXCLUDE REGEX "_tmpl\\.c$")             # compiled once per CPU level, through gen/
list(APPEND sources ${FV_KERNEL_SOURCES} ${FV_ISA_SOURCES})
if(FV_EXCLUDE)
  list(FILTER sources EXCLUDE REGEX "${FV_EXCLUDE}")
endif()

add_library(foveal_objects OBJECT ${sources})
target_include_directories(foveal_objects PRIVATE ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/src ${FV_GEN})

find_path(FV_XXHASH_INCLUDE xxhash.h)                       # header-only use
if(NOT FV_XXHASH_INCLUDE)
  message(FATAL_ERROR "xxhash.h is missing (Debian, Ubuntu: libxxhash-dev)")
endif()
if(NOT FV_XXHASH_INCLUDE STREQUAL "/usr/include")
  target_include_directories(foveal_objects SYSTEM PRIVATE ${FV_XXHASH_INCLUDE})
endif()

add_library(foveal SHARED $<TARGET_OBJECTS:foveal_objects>)
add_library(foveal_static STATIC $<TARGET_OBJECTS:foveal_objects>)
add_library(foveal::foveal ALIAS foveal)
add_library(foveal::static ALIAS foveal_static)
foreach(target foveal foveal_static)
  target_include_directories(${target} INTERFACE $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/include>
                             $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(${target} PRIVATE Threads::Threads m ${CMAKE_DL_LIBS})
endforeach()
set_target_properties(foveal PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION 0)
set_target_properties(foveal_static PROPERTIES OUTPUT_NAME foveal EXPORT_NAME static)

# Only what foveal.map names leaves the shared library, and nothing in it is left undefined.
set(map ${CMAKE_SOURCE_DIR}/cmake/foveal.map)
target_link_options(foveal PRIVATE -Wl,--version-script=${map} -Wl,-z,now -Wl,-z,relro -Wl,-z,noexecstack)
set_target_properties(foveal PROPERTIES LINK_DEPENDS ${map})
if(NOT FV_SANITIZE)                                         # a sanitizer's functions come from the program
  target_link_options(foveal PRIVATE -Wl,-z,defs)
endif()
