#!/bin/sh
# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Managed by blackwell.inference: asked as root before each start of a server. One line says why not.
#
# preflight.sh CHECKSUMS PORT GPUS MIB FILE
#   CHECKSUMS  list of SHA-256 checksums that the files with opened gates must match; need not exist
#   PORT       port that must be free
#   GPUS       GPUs that must be free, as nvidia-smi --id takes them; empty for all of them
#   MIB        memory that others may hold on one of them
#   FILE       where MAX_JOBS goes, the compilers that fit into the memory there is: 8 GiB each, and 16 left over
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

refuse() {
  echo "blackwell.inference: $1" >&2
  exit 1
}

if [ -e "$1" ] && ! changed=$(LC_ALL=C sha256sum --check --quiet --strict "$1" 2>/dev/null); then
  first=${changed%%: FAILED*} # the others fall with it
  refuse "opened gates have changed on disk (${first:-$1}), as after a reinstall of flashinfer or sglang. Run: ansible-playbook blackwell.inference.site --tags patch,cache,restart"
fi

# The kernel lists sockets with their local port in hex; state 0A listens.
if cat /proc/net/tcp /proc/net/tcp6 2>/dev/null |
  awk -v port=":$(printf %04X "$2")" '$4 == "0A" && substr($2, length($2) - 4) == port { found = 1 } END { exit !found }'; then
  refuse "port $2 is in use. Find the process: ss -ltnp sport = :$2"
fi

if command -v nvidia-smi >/dev/null; then
  held=$(timeout 30 nvidia-smi ${3:+"--id=$3"} --query-gpu=index,memory.used --format=csv,noheader,nounits |
    awk -F ', *' -v limit="$4" '$2 + 0 > limit { printf "%sGPU %s (%s MiB)", separator, $1, $2; separator = ", " }')
  [ -z "$held" ] || refuse "other processes hold memory on $held. Find them: nvidia-smi, and ps -ef | grep sglang::"
fi

[ -z "$5" ] || awk -v cores="$(nproc)" '/^MemAvailable:/ {
  jobs = int(($2 / 1048576 - 16) / 8)
  print "MAX_JOBS=" (jobs < 1 ? 1 : jobs > cores ? cores : jobs)
}' /proc/meminfo > "$5"
