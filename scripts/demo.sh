#!/usr/bin/env bash
# Installs what is needed, builds, and runs the main job on the models in data/: BF16 experts are
# quantized to NVFP4, and the recorded tokens run through every layer. Writes to build/ only.
set -euo pipefail
cd "$(dirname "$0")/.."

./scripts/install_dependencies.sh

echo "== building (preset release)"
cmake --preset release --log-level=WARNING
cmake --build --preset release --target hexpert_cli

hexpert=build/release/tools/hexpert
out=build/demo
mkdir -p "$out"

show() {
  echo
  echo "== ${*/#$hexpert/hexpert}"
  "$@"
}

show "$hexpert" info
for model in data/tiny-*/; do
  model=${model%/}
  nvfp4=$out/$(basename "$model")-nvfp4.safetensors
  rm -f "$nvfp4"
  show "$hexpert" quantize "$model/model.safetensors" "$nvfp4"
  show "$hexpert" run "$model/model.safetensors" --tokens "$model/tokens.safetensors" --all-layers
done

echo
echo "before, NVFP4: bytes of the experts. SNR dB: weights. rel L2, cos: layer output against BF16."
echo "equal, ulp: against the exact reference. More: $hexpert run --help"
