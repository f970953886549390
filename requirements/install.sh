#!/usr/bin/env bash
# Makes .venv hold what the locks beside this file list, and the package itself in editable form.
#
#   requirements/install.sh [runtime|dev]      PYTHON=python3.11 chooses the interpreter of a new .venv
#
# Safe to repeat: each stage leaves a stamp with the hash of everything it was made from, and is skipped while that hash holds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly SET="${1:-runtime}"
readonly PYTHON="${PYTHON:-python3.11}"
readonly VENV=.venv
readonly LOG="$VENV/setup.log"
readonly TORCH="torch==2.13.0"

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
hash_of() { cat -- "$@" | sha256sum | cut -d' ' -f1; }

# Runs one command, output to the log; says in one line why it failed.
logged() {
  local stage="$1"
  shift
  printf '\n=== %s: %s\n' "$stage" "$*" >>"$LOG"
  local from
  from=$(wc -l <"$LOG")
  if "$@" >>"$LOG" 2>&1; then return 0; fi
  local reason="see the end of $LOG"
  local output
  output=$(tail -n "+$((from + 1))" "$LOG")
  if grep -qE 'NewConnectionError|from versions: none|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|Network is unreachable|Temporary failure in name' <<<"$output"; then
    reason="no network, or the package index does not answer: check the connection and pip's settings (\`pip config list\`), then repeat; log: $LOG"
  elif grep -q 'No space left on device' <<<"$output"; then
    reason="the disk is full: .venv needs about 2 GiB with a CPU build of torch, 8 GiB with a CUDA build; log: $LOG"
  elif grep -qE 'No matching distribution found' <<<"$output"; then
    reason="$(grep -E 'No matching distribution found' <<<"$output" | tail -1 | sed 's/^ERROR: //') (is this Linux x86-64?); log: $LOG"
  elif grep -qE 'torchrec_kstep: ' <<<"$output"; then
    reason="$(grep -oE 'torchrec_kstep: .*' <<<"$output" | tail -1); log: $LOG"
  elif grep -qE ':[0-9]+: (fatal )?error: ' <<<"$output"; then
    reason="$(grep -E ':[0-9]+: (fatal )?error: ' <<<"$output" | head -1 | sed 's/^ *//'); log: $LOG"
  fi
  fail "$stage failed: $reason"
}

# stage NAME HASH DESCRIPTION COMMAND...: runs the command unless NAME's stamp already holds HASH.
stage() {
  local name="$1" hash="$2" description="$3"
  shift 3
  local stamp="$VENV/.stamp-$name"
  if [[ -f "$stamp" && "$(<"$stamp")" == "$hash" ]]; then return 0; fi
  say "$description"
  "$@"
  printf '%s' "$hash" >"$stamp"
}

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

make_venv() {
  if [[ -e "$VENV" ]]; then
    [[ "$(python_version "$VENV/bin/python")" == 3.11 ]] ||
      fail "$VENV exists but its Python does not run or is not 3.11: remove it (rm -rf $VENV) and repeat"
    return 0
  fi
  command -v "$PYTHON" >/dev/null ||
    fail "Python 3.11 is needed and '$PYTHON' is not found: install it, or name one: make PYTHON=/path/to/python3.11"
  local version
  version=$(python_version "$PYTHON") || fail "'$PYTHON' does not run; name a Python 3.11: make PYTHON=/path/to/python3.11"
  [[ "$version" == 3.11 ]] || fail "Python 3.11 is needed and '$PYTHON' is $version; name another: make PYTHON=/path/to/python3.11"
  say "making $VENV with $PYTHON"
  "$PYTHON" -m venv "$VENV" >/dev/null 2>&1 || { rm -rf "$VENV"; fail "'$PYTHON -m venv' does not work (Debian: apt-get install python3.11-venv)"; }
}

pip_install() { logged "$1" "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input "${@:2}"; }

# Kept apart from the package: compiling in place reuses the objects in build/, an editable install starts from nothing.
build_kernels() { logged "compiling kernels/" "$VENV/bin/python" setup.py --quiet build_ext --inplace; }

install_package() { KSTEP_WITHOUT_KERNELS=1 pip_install "installing the package" --no-deps --no-build-isolation --editable .; }

if [[ -n "$(find kernels -name '*.cpp' -print -quit)" ]]; then
  command -v "${CXX:-g++}" >/dev/null || fail "no C++ compiler '${CXX:-g++}': install g++ 9 or newer (Debian: apt-get install g++), or set CXX"
fi

make_venv
exec 9>"$VENV/.setup-lock"
flock -n 9 || { say "waiting for another setup of this checkout"; flock -w 1800 9 || fail "another setup has held $VENV for 30 minutes"; }

mapfile -d '' KERNEL_FILES < <(find kernels -type f \( -name '*.cpp' -o -name '*.h' \) -not -path 'kernels/tests/*' -print0 | sort -z)
# The folder is part of both: an editable install and the objects in build/ hold its path.
KERNELS_HASH=$({ pwd; "$VENV/bin/python" -V; printf '%s\n' "$TORCH" "${KERNEL_FILES[@]}"; cat setup.py "${KERNEL_FILES[@]}"; } | sha256sum | cut -d' ' -f1)
PACKAGE_HASH=$({ pwd; cat setup.py setup.cfg pyproject.toml torchrec_kstep/_version.py; } | sha256sum | cut -d' ' -f1)

stage torch "$(hash_of <(echo "$TORCH"))" "installing $TORCH (the largest download; README says how to get the small CPU build)" \
  pip_install "installing $TORCH" "$TORCH"
stage cpu "$(hash_of requirements/cpu.txt)" "installing requirements/cpu.txt" \
  pip_install "installing requirements/cpu.txt" --no-deps -r requirements/cpu.txt
if [[ "$SET" == dev ]]; then
  stage dev "$(hash_of requirements/dev.txt)" "installing requirements/dev.txt" \
    pip_install "installing requirements/dev.txt" --no-deps -r requirements/dev.txt
fi
stage kernels "$KERNELS_HASH" "compiling what changed in kernels/ (the first time: everything, a few minutes)" build_kernels
stage package "$PACKAGE_HASH" "installing torchrec_kstep in editable form" install_package
