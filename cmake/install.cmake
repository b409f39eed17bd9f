# The install tree: headers, both libraries, a CMake package and a pkg-config file.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/hexpert)

# Two sets, so that a C project gets the shared library without finding what the static one needs.
install(TARGETS hexpert EXPORT hexpertTargets)
install(TARGETS hexpert_c EXPORT hexpertCTargets)
foreach(set hexpertTargets hexpertCTargets)
  install(EXPORT ${set} NAMESPACE hexpert:: DESTINATION ${package_dir})
endforeach()
install(DIRECTORY include/hexpert DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

write_basic_package_version_file(${PROJECT_BINARY_DIR}/hexpertConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
configure_file(${CMAKE_CURRENT_LIST_DIR}/hexpertConfig.cmake.in ${PROJECT_BINARY_DIR}/hexpertConfig.cmake @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/hexpertConfig.cmake ${PROJECT_BINARY_DIR}/hexpertConfigVersion.cmake
  DESTINATION ${package_dir})

set(HEXPERT_PRIVATE_LIBS "${OpenMP_CXX_FLAGS} -lstdc++ -lm")
if(HEXPERT_HAS_CUDA)
  string(PREPEND HEXPERT_PRIVATE_LIBS "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt -lpthread ")
endif()
file(RELATIVE_PATH HEXPERT_PREFIX_FROM_PKGCONFIG /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${CMAKE_CURRENT_LIST_DIR}/hexpert.pc.in ${PROJECT_BINARY_DIR}/hexpert.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/hexpert.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
