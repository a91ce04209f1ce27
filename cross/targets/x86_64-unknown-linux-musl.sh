# x86-64 sites: industrial PCs, NUCs, most k3s boxes. Static against musl: one file for every distribution,
# from a scratch image or as a systemd service.

# Everything in one file, the C library included.
RUSTFLAGS_TARGET="-C target-feature=+crt-static"
# The start files and the unwinder come from the linker driver (zig), not from a std that was built here:
# a std from source brings none of its own.
RUSTFLAGS_STD_FROM_SOURCE="-C link-self-contained=no"
