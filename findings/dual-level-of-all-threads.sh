#!/bin/sh
# torch 2.13.0: forward-mode AD has one dual level for the whole process, where grad mode, autocast and torch.func's
# transforms have theirs for each thread. So two threads cannot use it at the same time, though each works on a model of
# its own: while one is inside of dual_level(), the other's raises "Nested forward mode AD is not supported", and a dual
# number that the second makes without a level of its own is accepted and belongs to the first one's.
# Prints what was seen, and exits with an error if the behaviour is another one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/env/bin/python" -W ignore - <<'PYTHON'
import threading

import torch
from torch.autograd import forward_ad

seen = {}


def beside():
    try:
        with forward_ad.dual_level():
            seen["a level of its own"] = "entered"
    except RuntimeError as error:
        seen["a level of its own"] = str(error)
    dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
    seen["the tangent of 3 x"] = forward_ad.unpack_dual(3 * dual).tangent
    seen["grad mode"] = torch.is_grad_enabled()


with torch.no_grad(), forward_ad.dual_level():
    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
print("torch", torch.__version__)
for what, found in seen.items():
    print(f"in another thread, {what}: {found}")
assert "Nested forward mode AD is not supported" in seen["a level of its own"], "threads have levels of their own now"
assert seen["the tangent of 3 x"].tolist() == [3, 3], "a dual number needs a level of the thread's own now"
assert seen["grad mode"], "grad mode is of all threads now"
PYTHON
