#!/bin/sh
# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Managed by blackwell.inference: asked as root before each start of a server. One line says why not.
#
# preflight.sh CHECKSUMS PORT GPUS MIB FILE PYTHON USER GROUP
#   CHECKSUMS  list of SHA-256 checksums that the files with opened gates must match; need not exist
#   PORT       port that must be free
#   GPUS       GPUs that must be free, as nvidia-smi --id takes them; empty for all of them
#   MIB        memory that others may hold on one of them
#   FILE       where MAX_JOBS goes, the compilers that fit into the memory there is: 8 GiB each, and 16 left over
#   PYTHON     interpreter of the server: of the files listed, those that it imports or that lie in its venv count. Without it, all do
#   USER       user and GROUP of the server
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export LC_ALL=C

refuse() {
  printf 'blackwell.inference: %s\n' "$1" >&2
  exit 1
}

# Where the server's packages are, and where those of an older Python in its venv were. The interpreter is asked as the server's user:
# root runs no code of a venv.
imported() {
  timeout 60 setpriv --reuid "$2" --regid "$3" --init-groups "$1" -I -c '
import importlib.util, os, sys
print(os.path.realpath(os.path.join(sys.prefix, "lib")))
for name in "flashinfer", "sglang":
    spec = importlib.util.find_spec(name)
    for folder in (spec and spec.submodule_search_locations) or ():
        print(os.path.join(os.path.realpath(os.path.dirname(folder)), name))' 2>&1
}

# The lines of a list for files in one of the folders, each path behind 64 digits and two spaces; all of them where no folder is given.
# What is no such line stays: it is refused.
lines_of() {
  folders=$1 awk '
    BEGIN { count = split(ENVIRON["folders"], own, "\n") }
    { counts = !count || index($0, "  /") != 65
      for (i in own) counts = counts || index($0, own[i] "/") == 67 }
    counts' "$2" 2>&1
}

if [ -e "$1" ]; then
  folders=
  if [ -n "$6" ]; then
    folders=$(imported "$6" "$7" "$8") ||
      refuse "$6 does not tell $7 where flashinfer and sglang are ($(printf '%s\n' "${folders:-no answer within 60 s}" | tail -n 1)). Try: sudo -u $7 $6 -c 'import flashinfer, sglang'"
  fi
  lines=$(lines_of "$folders" "$1") || refuse "$1 cannot be read ($lines)"
  if [ -n "$lines" ] && ! changed=$(printf '%s\n' "$lines" | sha256sum --check --quiet --strict 2>/dev/null); then
    first=${changed%%: FAILED*} # the others fall with it
    refuse "opened gates have changed on disk (${first:-$1}), as after a reinstall of flashinfer or sglang. Run: ansible-playbook blackwell.inference.site -l HOST"
  fi
fi

# The kernel lists sockets with their local port in hex; state 0A listens.
if cat /proc/net/tcp /proc/net/tcp6 2>/dev/null |
  awk -v port=":$(printf %04X "$2")" '$4 == "0A" && substr($2, length($2) - 4) == port { found = 1 } END { exit !found }'; then
  refuse "port $2 is in use. Find the process: ss -ltnp sport = :$2"
fi

# A driver that does not answer is no sign of free GPUs.
if command -v nvidia-smi >/dev/null; then
  cards=$(timeout 30 nvidia-smi ${3:+"--id=$3"} --query-gpu=index,memory.used --format=csv,noheader,nounits 2>&1)
  case $? in
    0) said=$(printf '%s\n' "$cards" | grep -E '^[0-9]+, ' | grep -m 1 -vE ', *([0-9]+|\[N/A\]|\[Not Supported\])$') ;;
    124) said="nothing within 30 s" ;;
    *) said=$(printf '%s\n' "${cards:-nothing, and failed}" | head -n 1) ;;
  esac
  [ -z "$said" ] || refuse "nvidia-smi said: $said. A GPU may be lost, or the driver was replaced. Look: nvidia-smi, and dmesg | grep NVRM"

  held=$(printf '%s\n' "$cards" | awk -F ', *' -v limit="$4" '$2 + 0 > limit { printf "%sGPU %s (%s MiB)", separator, $1, $2; separator = ", " }')
  [ -z "$held" ] || refuse "other processes hold memory on $held. Find them: nvidia-smi, and ps -ef | grep sglang::"
fi

[ -z "$5" ] || awk -v cores="$(nproc)" '/^MemAvailable:/ {
  jobs = int(($2 / 1048576 - 16) / 8)
  print "MAX_JOBS=" (jobs < 1 ? 1 : jobs > cores ? cores : jobs)
}' /proc/meminfo > "$5"
