#!/usr/bin/env bash
# Build the image of the test hosts, named $1: from debian:12, or where root has mmdebstrap, from Debian's packages alone.
set -euo pipefail
tag=$1
cd "$(dirname "$0")"
if [ "$(id -u)" != 0 ] || ! command -v mmdebstrap >/dev/null; then
  exec docker build --tag "$tag" .
fi
mmdebstrap --quiet --variant=minbase --include="$(paste --serial --delimiters=, packages)" \
  --aptopt='Acquire::Languages "none"' --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --dpkgopt='path-exclude=/usr/share/man/*' \
  --customize-hook='sh configure "$1"' --customize-hook='rm "$1/etc/hostname" "$1/etc/resolv.conf"' --customize-hook='install container-init "$1/sbin/container-init"' \
  bookworm - |
  docker import --change 'ENV container=docker' --change 'ENV LANG=C.UTF-8' --change 'CMD ["/sbin/container-init"]' - "$tag"
