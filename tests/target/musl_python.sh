#!/usr/bin/env bash
# A Python that runs on musl, as Alpine's does, for the tests of musllinux wheels on a machine with glibc: CPython, libffi and
# zlib from Debian's source packages, built with musl-gcc.
#
#     tests/target/musl_python.sh FOLDER       makes FOLDER/bin/python3, with ctypes
#     COLIBRI_MUSL_PYTHON=FOLDER/bin/python3 pytest tests/python/test_wheels.py
#
# Needs apt-get (Debian: it runs on Debian 12), a network, and the packages musl-tools, gcc, make, pkg-config and xz-utils.
set -euo pipefail
[ $# = 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1"
prefix=$(cd "$1" && pwd)
for tool in apt-get musl-gcc make pkg-config xz; do
    command -v "$tool" >/dev/null && continue
    echo "$0: $tool is missing (Debian: musl-tools gcc make pkg-config xz-utils)" >&2
    exit 1
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Source packages from where this machine has its packages, with lists of its own: the machine's apt stays as it is.
mkdir -p "$work/sources.d" "$work/lists/partial" "$work/packages"
for file in /etc/apt/sources.list /etc/apt/sources.list.d/{debian,ubuntu}.sources; do
    [ -f "$file" ] || continue
    copy=$work/sources.d/$(basename "${file/%sources.list/base.list}")
    sed -e 's/^deb /deb-src /' -e 's/^Types:.*/Types: deb-src/' "$file" >"$copy"
done
apt=(apt-get -q -o Dir::Etc::sourcelist=- -o Dir::Etc::sourceparts="$work/sources.d" -o Dir::State::lists="$work/lists"
    -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root)
python=$(apt-cache depends python3 | sed -n 's/^ *Depends: \(python3\.[0-9]*\)$/\1/p' | head -n 1)
"${apt[@]}" update >"$work/log"
release=$(. /etc/os-release && echo "$VERSION_CODENAME") # no updates: mirrors drop the older ones of them
(cd "$work/packages" && "${apt[@]}" source --download-only "$python/$release" "libffi/$release" "zlib/$release" >>"$work/log")

unpack() { # the folder of a source package's upstream sources
    mkdir "$work/$1"
    tar -xf "$(echo "$work/packages/$1"_*.orig.tar.*z*)" -C "$work/$1" --strip-components 1
    cd "$work/$1"
}
run() { "$@" >>"$work/log" 2>&1 || { tail -n 30 "$work/log" >&2; exit 1; }; }

# musl-gcc finds no headers of the kernel; they are the same for every C library.
mkdir "$work/kernel"
ln -s /usr/include/linux /usr/include/asm-generic "/usr/include/$(gcc -print-multiarch)/asm" "$work/kernel"
export CC="musl-gcc -idirafter $work/kernel" CFLAGS="-O1 -w -fPIC" PKG_CONFIG_LIBDIR="$work/deps/lib/pkgconfig"
unset PKG_CONFIG_PATH CPPFLAGS LDFLAGS
jobs=$(nproc)
unpack libffi
run ./configure --prefix="$work/deps" --disable-shared --disable-docs --disable-multi-os-directory
run make -j"$jobs" install
unpack zlib
run ./configure --static --prefix="$work/deps"
run make -j"$jobs" install
unpack "$python"
# The names of extension modules must say musl, as those in wheels do. Threads' stacks are small there: ask for larger ones.
export OPT="-DNDEBUG -O1" CPPFLAGS="-I$work/deps/include" LDFLAGS="-L$work/deps/lib -static-libgcc -Wl,-z,stack-size=0x100000"
sed -i 's/\$(\$CC --print-multiarch[^)]*)//' configure # musl-gcc's answer is glibc's
# Before 3.12 it is setup.py that looks for libraries, those of glibc too; large modules and those that need more are left out.
leave_out="$(echo _codecs_{cn,hk,jp,kr,tw,iso2022}) _decimal _tkinter _curses readline ossaudiodev"
[ ! -f setup.py ] || sed -i -e 's/^        self\.add_multiarch_paths()/        pass/' -e "s|'/usr/local/|'/nonexistent/|" \
    -e "s/^DISABLED_MODULE_LIST = .*/DISABLED_MODULE_LIST = '$leave_out'.split()/" setup.py
run ./configure --prefix="$prefix" --build="$(uname -m)-pc-linux-musl" --without-ensurepip --disable-test-modules
run make -j"$jobs"
run make install
"$prefix/bin/python3" -c 'import ctypes, sysconfig, zlib; print(sysconfig.get_config_var("SOABI"))'
