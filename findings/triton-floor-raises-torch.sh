#!/bin/sh
# torch 2.6.0 and later on Linux: each release asks for one release of Triton alone (2.6.0 for 3.2.0, 2.10.0 for
# 3.6.0), so that a lower bound on Triton in an optional extra is one on torch too. A project that takes torch>=2.6,
# and resolves its lowest versions to test these (uv 0.9.7, lowest-direct), tests torch 2.10.0 once an extra of the
# tests has triton>=3.6; nothing says so, and versions 2.6 to 2.9 are no longer tested. Without that extra, or with
# Triton overridden, it is 2.6.0.
# Prints what was seen, and exits with an error if the behaviour is another one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv==0.9.7
lowest() {
    "$folder/env/bin/uv" pip compile --quiet --resolution lowest-direct --python-version 3.10 \
        --python-platform x86_64-manylinux_2_28 "$@" - 2> "$folder/warnings" | grep -E '^(torch|triton)=='
}
alone=$(echo 'torch>=2.6' | lowest | tr '\n' ' ')
extra=$(printf 'torch>=2.6\ntriton>=3.6\n' | lowest | tr '\n' ' ')
echo "triton; sys_platform == 'none'" > "$folder/overrides.txt"
overridden=$(printf 'torch>=2.6\ntriton>=3.6\n' | lowest --overrides "$folder/overrides.txt" | tr '\n' ' ')
echo "torch>=2.6: $alone"
echo "torch>=2.6 and triton>=3.6: $extra"
echo "the same, Triton left out by an override: $overridden"
[ "$alone" = 'torch==2.6.0 triton==3.2.0 ' ]
[ "$extra" = 'torch==2.10.0 triton==3.6.0 ' ]
[ "$overridden" = 'torch==2.6.0 ' ]
