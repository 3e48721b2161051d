# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` puts where: libraries, headers, foveal-config.cmake, foveal.pc, the tool.
include(CMakePackageConfigHelpers)

install(TARGETS foveal foveal_static EXPORT foveal-targets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/foveal DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(TARGET foveal_tool)
  install(TARGETS foveal_tool RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(FV_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/foveal)
install(EXPORT foveal-targets NAMESPACE foveal:: DESTINATION ${FV_CMAKE_DIR})
configure_package_config_file(cmake/foveal-config.cmake.in ${CMAKE_BINARY_DIR}/foveal-config.cmake
                              INSTALL_DESTINATION ${FV_CMAKE_DIR})
# 0.x: a minor version may break the interface.
write_basic_package_version_file(${CMAKE_BINARY_DIR}/foveal-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/foveal-config.cmake ${CMAKE_BINARY_DIR}/foveal-config-version.cmake
        DESTINATION ${FV_CMAKE_DIR})

# The .pc file finds its prefix from its own place, so that an installed tree may be moved.
file(RELATIVE_PATH FV_PC_PREFIX /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(cmake/foveal.pc.in ${CMAKE_BINARY_DIR}/foveal.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/foveal.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
