# torch_cuda(<result>): which CUDA the torch of Python_EXECUTABLE was built for: a version such as 13.0, "none", or
# "unknown" where no torch is found, as in the environments that uv and `python -m build` make for the build alone.
#
# Nothing of torch is run: it is looked up, and its version.py is read. Under pip's build isolation it cannot be imported
# anyway, for PYTHONPATH then leads to packages that hide those of the environment; without that variable they are seen.
function(torch_cuda result)
  set(script "import os, sys; from importlib.machinery import PathFinder")
  string(APPEND script "\nfound = PathFinder.find_spec('torch', sys.argv[1].split(os.pathsep) + sys.path)")
  string(APPEND script "\nprint(found.origin if found and found.origin else '', end='')")
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E env --unset=PYTHONPATH --unset=PYTHONNOUSERSITE
            ${Python_EXECUTABLE} -c "${script}" "$ENV{PYTHONPATH}"
    OUTPUT_VARIABLE torch ERROR_QUIET)
  string(REGEX REPLACE "__init__\\.py$" "version.py" file "${torch}")
  set(text "")
  if(torch AND EXISTS "${file}")
    file(READ "${file}" text)
  endif()
  set(found unknown)
  if(text MATCHES "(^|\n)cuda[^=\n]*= *['\"]([0-9.]+)['\"]")
    set(found "${CMAKE_MATCH_2}")
  elseif(text MATCHES "(^|\n)cuda[^=\n]*= *None")
    set(found none)
  endif()
  set(${result} ${found} PARENT_SCOPE)
endfunction()
