#!/bin/sh
# Standard streams that are closed or full: an exit code tells, and no output file gets their text.
#   cli_streams.sh HEXPERT MODEL
hexpert=$1
model=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failed=0

expect() {
  wanted=$1
  shift
  sh -c "$*" hexpert "$hexpert" "$model" "$dir" >"$dir/text" 2>&1
  got=$?
  if [ "$got" -ne "$wanted" ]; then
    echo "expected exit code $wanted, got $got: $*"
    cat "$dir/text"
    failed=1
  fi
}

expect 0 '"$1" info'
expect 3 '"$1" info >/dev/full'
expect 3 '"$1" info >&-'
expect 3 '"$1" info >&- 2>&- <&-'
expect 2 '"$1" frobnicate 2>&-'
expect 2 '"$1" frobnicate >&- 2>&- <&-'
expect 3 '"$1" inspect /no/such/file >/dev/full 2>/dev/full'
expect 0 '"$1" quantize "$2" "$3/a.safetensors"'
expect 3 '"$1" quantize "$2" "$3/b.safetensors" >&- 2>&- <&-'
expect 0 '"$1" quantize "$2" "$3/c.safetensors" --progress 2>&-'
expect 0 '"$1" quantize "$2" "$3/d.safetensors" --progress 2>/dev/full'
for copy in b c d; do
  expect 0 "\"\$1\" inspect \"\$3/$copy.safetensors\""
  # The header names the file; the weights follow it.
  if ! [ "$(tail -c 500000 "$dir/a.safetensors" | cksum)" = \
    "$(tail -c 500000 "$dir/$copy.safetensors" | cksum)" ]; then
    echo "$copy.safetensors differs"
    failed=1
  fi
done
exit $failed
