# hexpert::hexpert_c: the shared library, C ABI. hexpert::hexpert: the static library with the C++ API, for
# projects that have C++ enabled.
include(CMakeFindDependencyMacro)
include(${CMAKE_CURRENT_LIST_DIR}/hexpertCTargets.cmake)
get_property(hexpert_languages GLOBAL PROPERTY ENABLED_LANGUAGES)
if(CXX IN_LIST hexpert_languages)
  find_dependency(OpenMP COMPONENTS CXX)
  include(${CMAKE_CURRENT_LIST_DIR}/hexpertTargets.cmake)
endif()
unset(hexpert_languages)
