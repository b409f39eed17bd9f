# libhexpert.so exports the functions of hexpert.h, all of them and nothing else.
# Called with -DSOURCE_DIR=... -DLIBRARY=... -DNM=...
execute_process(COMMAND ${NM} --dynamic --defined-only --format=posix ${LIBRARY}
  OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]+" lines "${symbols}")
foreach(line ${lines})
  if(line MATCHES "^HEXPERT_[0-9.]+(@@HEXPERT_[0-9.]+)? A")
    continue()  # the version node, as GNU nm or as llvm-nm spells it
  endif()
  string(REGEX REPLACE "[@ ].*" "" symbol "${line}")
  list(APPEND exported ${symbol})
endforeach()
file(READ ${SOURCE_DIR}/include/hexpert/hexpert.h header)
string(REGEX MATCHALL "HX_API [^(;]*hx_[a-z0-9_]+\\(" declarations "${header}")
foreach(declaration ${declarations})
  string(REGEX REPLACE ".*(hx_[a-z0-9_]+)\\($" "\\1" name "${declaration}")
  list(APPEND declared ${name})
endforeach()
list(SORT exported)
list(SORT declared)
list(LENGTH declared count)
if(count LESS 20 OR NOT exported STREQUAL declared)
  message(FATAL_ERROR "exported: ${exported}\ndeclared in hexpert.h: ${declared}")
endif()
