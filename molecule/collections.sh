#!/usr/bin/env bash
# Lay out the collections of the scenarios in .cache/molecule/collections: this checkout, and those of requirements.yml,
# from Galaxy, or where that is out of reach, out of the PyPI wheel of the package "ansible", which holds them too.
set -euo pipefail
cd "$(dirname "$0")/.."
collections=.cache/molecule/collections
mkdir -p "$collections/ansible_collections/blackwell"
ln -sfn ../../../../.. "$collections/ansible_collections/blackwell/inference"
[ ! -d "$collections/ansible_collections/community" ] || exit 0
download=$(mktemp -d --tmpdir="$PWD/.cache/molecule")
trap 'rm -rf "$download"' EXIT
if ! ansible-galaxy collection install --timeout 10 --collections-path "$download" --requirements-file molecule/requirements.yml; then
  echo "ansible==12.3.0 --hash=sha256:cd156f82fa87f7a899212b0efa9f7ca3a24d609212de9f78428a572eb01e5414" > "$download/requirements.txt"
  python3 -m pip download --quiet --require-hashes --no-deps --dest "$download" --requirement "$download/requirements.txt"
  python3 - "$download" <<'PYTHON'
import pathlib, sys, zipfile

folder = pathlib.Path(sys.argv[1])
wanted = ("ansible_collections/community/docker/", "ansible_collections/community/library_inventory_filtering_v1/")
with zipfile.ZipFile(next(folder.glob("ansible-*.whl"))) as wheel:
    wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(wanted)])
PYTHON
fi
mv "$download/ansible_collections/community" "$collections/ansible_collections/"
