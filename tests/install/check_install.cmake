# Installs a build, then builds and runs separate projects against the install tree alone: the C example
# through find_package and through pkg-config, shared and static, and a C++ project. Called with -DSOURCE_DIR=...
# -DBUILD_DIR=... -DWORK_DIR=... -DC_COMPILER=... -DCXX_COMPILER=...
file(REMOVE_RECURSE ${WORK_DIR})
file(MAKE_DIRECTORY ${WORK_DIR})
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    string(REPLACE ";" " " command "${ARGN}")
    message(FATAL_ERROR "${command}: ${result}\n${output}")
  endif()
  message("${output}")
endfunction()

# Moved after the install: nothing may depend on where the tree lay.
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/first)
file(RENAME ${WORK_DIR}/first ${WORK_DIR}/prefix)
set(compilers -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER})
foreach(project examples/c tests/install)
  string(MAKE_C_IDENTIFIER ${project} name)
  run(${CMAKE_COMMAND} -S ${SOURCE_DIR}/${project} -B ${WORK_DIR}/${name} -G Ninja
    -DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF ${compilers})
  run(${CMAKE_COMMAND} --build ${WORK_DIR}/${name})
endforeach()
run(${WORK_DIR}/examples_c/routed_moe_c)
run(${WORK_DIR}/tests_install/consumer)

find_program(PKG_CONFIG NAMES pkg-config pkgconf)
file(GLOB_RECURSE pc ${WORK_DIR}/prefix/*/hexpert.pc)
if(NOT PKG_CONFIG)
  message("pkg-config not found: its file is not tested")
  return()
endif()
get_filename_component(pc_dir ${pc} DIRECTORY)
set(ENV{PKG_CONFIG_PATH} ${pc_dir})
function(build_example name)
  execute_process(COMMAND ${PKG_CONFIG} --cflags --libs ${ARGN} hexpert OUTPUT_VARIABLE flags
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  run(${C_COMPILER} -std=c11 -pedantic-errors -Wall -Wextra -Werror ${SOURCE_DIR}/examples/c/routed_moe.c
    -o ${WORK_DIR}/${name} ${flags})
endfunction()
build_example(pkg_config_shared)
execute_process(COMMAND ${PKG_CONFIG} --variable=libdir hexpert OUTPUT_VARIABLE libdir
  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
set(ENV{LD_LIBRARY_PATH} ${libdir})
run(${WORK_DIR}/pkg_config_shared)
file(GLOB shared ${libdir}/libhexpert.so*)
file(REMOVE ${shared})  # a linker prefers it
build_example(pkg_config_static --static)
run(${WORK_DIR}/pkg_config_static)
