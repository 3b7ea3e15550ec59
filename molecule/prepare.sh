#!/bin/sh
# Runs on a test host: install the serving venv $1, the simulated engine, and an nvidia-smi that is replayed or captured ($2).
set -eu
source=/srv/blackwell
rm -rf /opt/sglang /opt/simulated
mkdir /opt/sglang
cp -R "$source/.cache/molecule/$1" /opt/sglang/venv
cp -R "$source/molecule/simulated" /opt/
cp "$source/tests/unit/fixtures/sglang_parser.py" /opt/simulated/
ln -s /bin/sleep /opt/simulated/cicc # the simulated compiler has the name of nvcc's
case $2 in
  replayed) cp "$source/demo/replay/nvidia_smi.py" /opt/simulated/ ;;
  captured)
    cp "$source/molecule/captured_nvidia_smi.py" /opt/simulated/nvidia_smi.py
    cp -R "$source/tests/unit/fixtures/nvidia-smi" /opt/simulated/
    ;;
esac
printf '#!/bin/sh\nexec python3 /opt/simulated/nvidia_smi.py "$@"\n' > /usr/local/bin/nvidia-smi
chown -R 0:0 /opt/sglang /opt/simulated
chmod -R u=rwX,go=rX /opt/sglang /opt/simulated
chmod 755 /usr/local/bin/nvidia-smi
