# Sourced by cross/build and tests/run: what Debian and PyPI provide, installed when missing.
# Says what to do where it cannot install.

cache_dir() { echo "${XDG_CACHE_HOME:-$HOME/.cache}/argocd-agent-lite"; }

# need_packages PACKAGE…: Debian packages. One `apt-get update` for each process at most.
need_packages() {
  local missing=() package
  for package; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} = 0 ] && return 0
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing: run  apt-get update && apt-get install ${missing[*]}  as root" >&2
    return 1
  fi
  echo "installing Debian packages: ${missing[*]}" >&2
  if [ -z "${APT_UPDATED:-}" ]; then
    apt-get -qq update >&2 || return 1
    export APT_UPDATED=1
  fi
  DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends "${missing[@]}" >/dev/null
}

# need_zig: a C compiler and linker for every target, with its musl and libunwind, as wheels in a virtual
# environment of our own. Versions are pinned: the linker decides bytes. Prints the directory for PATH.
need_zig() {
  local zig=0.15.2 zigbuild=0.23.4 dir
  dir="$(cache_dir)/zig-$zig-$zigbuild"
  if [ ! -e "$dir/complete" ]; then
    command -v python3 >/dev/null || { echo "missing: python3 with its venv module" >&2; return 1; }
    echo "installing ziglang $zig and cargo-zigbuild $zigbuild into $dir" >&2
    rm -rf "$dir"
    python3 -m venv "$dir" >&2 || { need_packages python3-venv && python3 -m venv "$dir" >&2; } || return 1
    "$dir/bin/pip" install --quiet --disable-pip-version-check "ziglang==$zig" "cargo-zigbuild==$zigbuild" >&2 || {
      echo "missing: run  $dir/bin/pip install ziglang==$zig cargo-zigbuild==$zigbuild" >&2
      return 1
    }
    touch "$dir/complete"
  fi
  echo "$dir/bin"
}

# Debian's second toolchain (kept current for browsers): it comes with the sources of std, which rustup's
# toolchain lacks unless its rust-src component is installed.
need_debian_rust() { need_packages rustc-web cargo-web rust-web-src; }

# rustup_has TARGET: whether rustup's toolchain has a ready std for the target.
rustup_has() { rustup target list --installed 2>/dev/null | grep -qx "$1"; }
