//! Builds the library, the tools and the C tests, for any target that zig reaches (zig 0.16.0 and 0.17).
//!
//!     zig build                            everything, into zig-out/ (or --prefix DIR)
//!     zig build so                         only the shared library: what a Python wheel needs
//!     zig build test                       build and run tests/c/test_*.c
//!     zig build test-programs              only build them, into PREFIX/tests, to run them on another machine
//!     zig build numa-init                  tests/target/numa/init.c into PREFIX/tests: what a machine with several nodes boots into
//!     zig build firmware                   tests/target/firmware into PREFIX/tests: the library on a bare 64-bit ARM core
//!     zig build golden                     print what tests/c/test_golden.c compares with
//!     zig build web                        colibri.wasm for browsers, into PREFIX/web (whatever -Dtarget says)
//!     zig build dist                       archives for all targets and their SHA-256 sums, into PREFIX/dist (-Dpython=NAME)
//!     -Dtarget=aarch64-linux-gnu.2.17      default: this machine, baseline CPU (faster kernels are chosen at run time)
//!     -Doptimize=Debug                     default: ReleaseFast
//!     -Dthreads=false                      without threads: num_threads is 1, or a host's parallel_for runs the work
//!     -Dfile_io=false                      without files and mappings: models are memory (config.model_data); no tools
//!     -Donly=test_golden                   of the C tests only this one; may be repeated

const std = @import("std");

const version: std.SemanticVersion = .{ .major = 0, .minor = 1, .patch = 0 };

/// Portable C, compiled for the target's baseline CPU.
const base_sources = [_][]const u8{
    "lib/model/pack.c",
    "lib/base/threads.c",
    "lib/base/math.c",
    "lib/model/crc32.c",
    "lib/kernels/ref_float.c",
    "lib/kernels/ref_integer.c",
    "lib/forward/kvcache.c",
    "lib/forward/project.c",
    "lib/forward/attention.c",
    "lib/forward/router.c",
    "lib/forward/experts.c",
    "lib/forward/forward.c",
};
/// The same, made small rather than fast: what runs once, or does little.
const small_sources = [_][]const u8{
    "lib/forward/sampler.c",
    "lib/model/tokenizer_decode.c",
    "lib/model/tokenizer_bpe.c",
    "lib/model/tokenizer_split.c",
    "lib/model/tokenizer.c",
    "lib/kernels/ref.c",
    "lib/model/pack_q4.c",
    "lib/colibri.c",
    "lib/base/status.c",
    "lib/base/structs.c",
    "lib/base/arena.c",
    "lib/base/os.c",
    "lib/base/os_memory.c",
    "lib/base/os_threads.c",
    "lib/base/os_bare.c",
    "lib/base/os_windows.c",
    "lib/base/os_write.c",
    "lib/base/os_guard.c",
    "lib/base/reader.c",
    "lib/base/affinity.c",
    "lib/base/numa.c",
    "lib/base/os_numa.c",
    "lib/base/cpu.c",
    "lib/kernels/select.c",
    "lib/model/format.c",
    "lib/model/weights.c",
    "lib/model/residency.c",
    "lib/model/residency_use.c",
    "lib/model/expert_cache.c",
    "lib/model/profile.c",
    "lib/model/model.c",
    "lib/model/unicode.c",
    "lib/model/unicode_data.c",
    "lib/forward/plan.c",
    "lib/forward/capacity.c",
    "lib/forward/config.c",
    "lib/forward/session.c",
    "lib/forward/stats.c",
    "lib/forward/metrics.c",
};

/// A file that may use more than the baseline; lib/kernels/select.c calls into it only where the CPU has `features`.
const IsaSource = struct { file: []const u8, features: []const []const u8 };

/// clang before zig 0.17 gates 512-bit vectors by a feature that later ones no longer know.
const evex512: []const []const u8 = if (@import("builtin").zig_version.minor < 17) &.{"evex512"} else &.{};
const avx512: []const []const u8 = &[_][]const u8{
    "avx2", "fma", "f16c", "bmi", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq",
} ++ evex512;
const isa_x86_64 = [_]IsaSource{
    .{ .file = "lib/kernels/avx2.c", .features = &.{ "avx2", "fma", "f16c", "bmi", "bmi2" } },
    .{ .file = "lib/kernels/avx512.c", .features = avx512 },
    .{ .file = "lib/kernels/amx.c", .features = avx512 ++ [_][]const u8{ "avx512vbmi", "amx-tile", "amx-int8" } },
};
const isa_aarch64 = [_]IsaSource{
    .{ .file = "lib/kernels/neon.c", .features = &.{} },
    .{ .file = "lib/kernels/neon_dotprod.c", .features = &.{"dotprod"} },
    .{ .file = "lib/kernels/neon_i8mm.c", .features = &.{ "dotprod", "i8mm" } },
};

/// Each is one program, tests/c/NAME.c, linked with the static library; lib/ is on its include path.
const tests = [_][]const u8{
    "test_base",
    "test_os",
    "test_threads",
    "test_reader",
    "test_numa",
    "test_guard",
    "test_math",
    "test_kernels",
    "test_avx2",
    "test_avx512",
    "test_amx",
    "test_pack",
    "test_format",
    "test_tokenizer",
    "test_session",
    "test_hosts",
    "test_capacity",
    "test_golden",
    "test_hostile",
    "test_residency",
    "test_residency_failures",
    "test_quiet",
    "test_metrics",
};

/// Programs: tools/NAME.c, tools/cli_common.c and what else they are made of.
const Tool = struct { name: []const u8, more: []const []const u8 = &.{} };
const tools = [_]Tool{
    .{ .name = "colibri-infer" },
    .{ .name = "colibri-bench", .more = &.{ "tools/limits.c", "tools/limits_units.c" } },
};

const c_flags = [_][]const u8{ "-std=gnu11", "-Wall", "-Wextra", "-ffp-contract=off" };
/// No unrolling but what the source asks for: the kernels are unrolled by hand, the rest is not hot.
const library_flags = c_flags ++ [_][]const u8{ "-fvisibility=hidden", "-DCOLIBRI_BUILD", "-fno-unroll-loops" };

pub fn build(b: *std.Build) void {
    var query = oldGlibc(b, b.standardTargetOptionsQueryOnly(.{ .default_target = .{ .cpu_model = .baseline } }));
    if (query.cpu_arch == .wasm32) query.cpu_features_add.addFeature(@intFromEnum(std.Target.wasm.Feature.simd128));
    const optimize = b.option(std.builtin.OptimizeMode, "optimize", "Debug, ReleaseSafe, ReleaseFast (default) or ReleaseSmall") orelse
        std.builtin.OptimizeMode.ReleaseFast;
    const debug = optimize == std.builtin.OptimizeMode.Debug;
    const settings: Settings = .{
        .optimize = optimize,
        .strip = b.option(bool, "strip", "Leave out debug information (default: unless Debug)") orelse !debug,
        .ubsan = b.option(bool, "ubsan", "Undefined behaviour sanitizer (default: in Debug)") orelse debug,
        .tsan = b.option(bool, "tsan", "Thread sanitizer") orelse false,
        .threads = b.option(bool, "threads", "Start threads (default: true)") orelse true,
        .file_io = b.option(bool, "file_io", "Open files, map them, ask the system about itself (default: true)") orelse true,
        .only = b.option([]const []const u8, "only", "Of the C tests only this one; may be repeated"),
    };
    const target = b.resolveTargetQuery(query);
    if (target.result.os.tag == .windows and !(settings.threads and settings.file_io))
        @panic("-Dthreads=false and -Dfile_io=false are not for Windows");

    const static = addStatic(b, target, settings);
    b.installArtifact(static);
    if (target.result.os.tag != .wasi) addShared(b, target, settings);
    b.installFile("include/colibri.h", "include/colibri.h");
    b.installFile("include/colibri.hpp", "include/colibri.hpp");
    b.installFile("include/colibri_format.h", "include/colibri_format.h");
    addPkgConfig(b, target);
    addCMake(b, target);
    addDist(b);
    addWeb(b, settings);
    addFirmware(b, settings);
    if (settings.file_io) addTools(b, query, static, settings);
    addTests(b, target, static, settings);
}

/// Where the C library is glibc and no version was named: 2.17, which every distribution since 2014 has.
fn oldGlibc(b: *std.Build, asked: std.Target.Query) std.Target.Query {
    const result = b.resolveTargetQuery(asked).result;
    var query = asked;
    const old_enough = switch (result.cpu.arch) {
        .x86_64, .x86, .aarch64, .arm => true,
        else => false, // ported to Linux later
    };
    if (result.os.tag != .linux or !result.abi.isGnu() or asked.glibc_version != null or !old_enough) return query;
    query.abi = result.abi;
    query.glibc_version = .{ .major = 2, .minor = 17, .patch = 0 };
    return query;
}

const Settings = struct {
    optimize: std.builtin.OptimizeMode,
    strip: bool,
    ubsan: bool,
    tsan: bool,
    threads: bool,
    file_io: bool,
    only: ?[]const []const u8,

    fn module(s: Settings, b: *std.Build, target: std.Build.ResolvedTarget) *std.Build.Module {
        const m = b.createModule(.{
            .target = target,
            .optimize = s.optimize,
            .link_libc = true, // and with it libm and libpthread
            .strip = s.strip,
            .sanitize_c = if (s.ubsan) .full else .off,
            .sanitize_thread = if (s.tsan) true else null,
            .omit_frame_pointer = if (s.strip) true else null,
            .pic = true, // one static library for executables and shared objects alike
        });
        m.addIncludePath(b.path("include"));
        if (target.result.os.tag == .wasi) { // a number for names of files that are nobody else's
            m.addCMacro("_WASI_EMULATED_GETPID", "1");
            m.linkSystemLibrary("wasi-emulated-getpid", .{});
        }
        if (!s.threads) m.addCMacro("COLI_NO_THREADS", "1");
        if (!s.file_io) m.addCMacro("COLI_NO_FILES", "1");
        if (target.result.os.tag == .windows) m.linkSystemLibrary("api-ms-win-core-synch-l1-2-0", .{}); // WaitOnAddress
        return m;
    }
};

/// All of the library's C for one target.
fn libraryModule(b: *std.Build, target: std.Build.ResolvedTarget, settings: Settings) *std.Build.Module {
    const m = settings.module(b, target);
    m.addIncludePath(b.path("lib"));
    for (base_sources) |file| m.addCSourceFile(.{ .file = b.path(file), .flags = &library_flags });
    const debug = settings.optimize == std.builtin.OptimizeMode.Debug;
    const small: []const []const u8 = if (debug) &library_flags else &(library_flags ++ [_][]const u8{"-Os"});
    for (small_sources) |file| m.addCSourceFile(.{ .file = b.path(file), .flags = small });
    const isa_sources: []const IsaSource = switch (target.result.cpu.arch) {
        .x86_64 => &isa_x86_64,
        .aarch64 => &isa_aarch64,
        else => &.{},
    };
    for (isa_sources) |source| {
        m.addCSourceFile(.{ .file = b.path(source.file), .flags = withFeatures(b, &library_flags, source.features) });
    }
    return m;
}

/// Not "-mavx2": zig turns every feature outside -Dcpu off by "-Xclang -target-feature", which beats -m flags. The same
/// spelling later on the command line wins.
fn withFeatures(b: *std.Build, common: []const []const u8, features: []const []const u8) []const []const u8 {
    const flags = b.allocator.alloc([]const u8, common.len + 4 * features.len) catch @panic("out of memory");
    @memcpy(flags[0..common.len], common);
    for (features, 0..) |feature, i| {
        const add = [4][]const u8{ "-Xclang", "-target-feature", "-Xclang", b.fmt("+{s}", .{feature}) };
        @memcpy(flags[common.len + 4 * i ..][0..4], &add);
    }
    return flags;
}

fn addStatic(b: *std.Build, target: std.Build.ResolvedTarget, settings: Settings) *std.Build.Step.Compile {
    // On Windows the static library and the DLL's import library would share the name colibri.lib.
    const name = if (target.result.os.tag == .windows) "colibri_static" else "colibri";
    const lib = b.addLibrary(.{ .name = name, .linkage = .static, .root_module = libraryModule(b, target, settings) });
    lib.link_function_sections = true;
    lib.link_data_sections = true;
    if (settings.ubsan) lib.bundle_ubsan_rt = true; // so that other linkers can use a Debug archive
    return lib;
}

fn addShared(b: *std.Build, target: std.Build.ResolvedTarget, settings: Settings) void {
    const m = libraryModule(b, target, settings);
    if (target.result.os.tag == .windows) m.addCMacro("COLIBRI_SHARED", "1"); // elsewhere the static library's objects serve
    const lib = b.addLibrary(.{ .name = "colibri", .linkage = .dynamic, .version = version, .root_module = m });
    lib.link_function_sections = true;
    lib.link_data_sections = true;
    lib.link_gc_sections = true;
    const install = b.addInstallArtifact(lib, .{});
    b.getInstallStep().dependOn(&install.step);
    b.step("so", "Build only the shared library").dependOn(&install.step);
}

/// lib/pkgconfig/colibri.pc. The prefix is relative to the file itself, so the tree can be moved.
fn addPkgConfig(b: *std.Build, target: std.Build.ResolvedTarget) void {
    const private_libs = switch (target.result.os.tag) {
        .linux => "-lpthread",
        .windows => "-lsynchronization",
        .wasi => "-lwasi-emulated-getpid",
        else => "",
    };
    const text = b.fmt(
        \\prefix=${{pcfiledir}}/../..
        \\includedir=${{prefix}}/include
        \\libdir=${{prefix}}/lib
        \\
        \\Name: colibri
        \\Description: Mixture-of-Experts language models on CPUs
        \\Version: {d}.{d}.{d}
        \\Cflags: -I${{includedir}}
        \\Libs: -L${{libdir}} -lcolibri
        \\Libs.private: {s}
        \\
    , .{ version.major, version.minor, version.patch, private_libs });
    const file = b.addWriteFiles().add("colibri.pc", text);
    b.getInstallStep().dependOn(&b.addInstallFile(file, "lib/pkgconfig/colibri.pc").step);
}

/// lib/cmake/Colibri: what CMake's find_package(Colibri) reads. Like colibri.pc, relative to itself.
fn addCMake(b: *std.Build, target: std.Build.ResolvedTarget) void {
    const os = target.result.os.tag;
    const static_file = if (os == .windows) "lib/colibri_static.lib" else "lib/libcolibri.a";
    const static_needs = switch (os) {
        .linux => "pthread",
        .windows => "synchronization",
        .wasi => "wasi-emulated-getpid",
        else => "",
    };
    const shared_properties = switch (os) {
        .windows =>
        \\    IMPORTED_LOCATION "${COLIBRI_PREFIX}/bin/colibri.dll"
        \\    IMPORTED_IMPLIB "${COLIBRI_PREFIX}/lib/colibri.lib"
        \\    INTERFACE_COMPILE_DEFINITIONS COLIBRI_SHARED
        ,
        .macos =>
        \\    IMPORTED_LOCATION "${COLIBRI_PREFIX}/lib/libcolibri.dylib"
        ,
        else =>
        \\    IMPORTED_LOCATION "${COLIBRI_PREFIX}/lib/libcolibri.so"
        \\    IMPORTED_SONAME "libcolibri.so.0"
        ,
    };
    const shared = b.fmt(
        \\add_library(Colibri::colibri SHARED IMPORTED)
        \\set_target_properties(Colibri::colibri PROPERTIES
        \\    INTERFACE_INCLUDE_DIRECTORIES "${{COLIBRI_PREFIX}}/include"
        \\{s})
        \\
    , .{shared_properties});
    const config = b.fmt(
        \\# Colibri::colibri is the shared library, Colibri::colibri_static the static one. The folder may be moved as a whole.
        \\if(TARGET Colibri::colibri_static)
        \\    return()
        \\endif()
        \\get_filename_component(COLIBRI_PREFIX "${{CMAKE_CURRENT_LIST_DIR}}/../../.." ABSOLUTE)
        \\add_library(Colibri::colibri_static STATIC IMPORTED)
        \\set_target_properties(Colibri::colibri_static PROPERTIES
        \\    INTERFACE_INCLUDE_DIRECTORIES "${{COLIBRI_PREFIX}}/include"
        \\    IMPORTED_LINK_INTERFACE_LANGUAGES C
        \\    INTERFACE_LINK_LIBRARIES "{s}"
        \\    IMPORTED_LOCATION "${{COLIBRI_PREFIX}}/{s}")
        \\{s}unset(COLIBRI_PREFIX)
        \\
    , .{ static_needs, static_file, if (os == .wasi) "" else shared });
    const files = b.addWriteFiles();
    const folder = "lib/cmake/Colibri/";
    const config_file = files.add("ColibriConfig.cmake", config);
    b.getInstallStep().dependOn(&b.addInstallFile(config_file, folder ++ "ColibriConfig.cmake").step);
    const version_file = files.add("ColibriConfigVersion.cmake", cmakeVersion(b, target));
    b.getInstallStep().dependOn(&b.addInstallFile(version_file, folder ++ "ColibriConfigVersion.cmake").step);
}

/// Compatible is what has the same major and minor version (before 1.0 each minor one may change the API) and size of pointers.
fn cmakeVersion(b: *std.Build, target: std.Build.ResolvedTarget) []const u8 {
    return b.fmt(
        \\set(PACKAGE_VERSION "{d}.{d}.{d}")
        \\set(PACKAGE_VERSION_COMPATIBLE FALSE)
        \\if(PACKAGE_FIND_VERSION_MAJOR EQUAL {d} AND NOT PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION)
        \\    if(PACKAGE_FIND_VERSION_COUNT EQUAL 1 OR PACKAGE_FIND_VERSION_MINOR EQUAL {d})
        \\        set(PACKAGE_VERSION_COMPATIBLE TRUE)
        \\    endif()
        \\endif()
        \\if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
        \\    set(PACKAGE_VERSION_EXACT TRUE)
        \\endif()
        \\if(CMAKE_SIZEOF_VOID_P AND NOT CMAKE_SIZEOF_VOID_P EQUAL {d})
        \\    set(PACKAGE_VERSION "${{PACKAGE_VERSION}} (for another kind of processor)")
        \\    set(PACKAGE_VERSION_UNSUITABLE TRUE)
        \\endif()
        \\
    , .{ version.major, version.minor, version.patch, version.major, version.minor, target.result.ptrBitWidth() / 8 });
}

/// Archives for other machines: tools/make_dist.py calls `zig build` once for each of its targets.
fn addDist(b: *std.Build) void {
    const on_windows = @import("builtin").os.tag == .windows;
    const python = b.option([]const u8, "python", "The Python that `zig build dist` runs") orelse
        if (on_windows) "python" else "python3";
    const run = b.addSystemCommand(&.{ python, "tools/make_dist.py", "--zig", b.graph.zig_exe });
    if (@hasDecl(std.Build, "getInstallPath")) { // before zig 0.17
        run.addArg(b.getInstallPath(.prefix, "dist"));
    } else {
        run.addDirectoryArg(.{ .relative = .{ .base = .install_prefix, .sub_path = "dist" } });
    }
    run.setCwd(b.path("."));
    run.has_side_effects = true;
    run.stdio = .inherit;
    b.step("dist", "Archives for all targets, into PREFIX/dist").dependOn(&run.step);
}

/// colibri.wasm: no threads, no files, and the exports of tools/colibri-web.c alone.
fn addWeb(b: *std.Build, asked: Settings) void {
    var settings = asked;
    settings.threads = false;
    settings.file_io = false;
    settings.ubsan = false;
    settings.tsan = false;
    var query: std.Target.Query = .{ .cpu_arch = .wasm32, .os_tag = .wasi };
    query.cpu_features_add.addFeature(@intFromEnum(std.Target.wasm.Feature.simd128));
    const target = b.resolveTargetQuery(query);
    const exe = addProgram(b, target, addStatic(b, target, settings), settings, "colibri", "tools/colibri-web.c");
    exe.wasi_exec_model = .reactor;
    exe.entry = .disabled;
    const install = b.addInstallArtifact(exe, .{ .dest_dir = .{ .override = .{ .custom = "web" } } });
    b.step("web", "Build colibri.wasm, the library for browsers").dependOn(&install.step);
}

/// firmware.elf for QEMU's board "virt": the bare library and a program for no system at all. The library's target is Linux's
/// musl, for the sake of C headers; neither musl nor anything else of a system is linked.
fn addFirmware(b: *std.Build, asked: Settings) void {
    var settings = asked;
    settings.threads = false;
    settings.file_io = false;
    settings.ubsan = false;
    settings.tsan = false;
    const small = settings.optimize == std.builtin.OptimizeMode.ReleaseSmall;
    if (!small) settings.optimize = .ReleaseFast; // others need the C library to check the stack
    const lib = addStatic(b, b.resolveTargetQuery(.{ .cpu_arch = .aarch64, .os_tag = .linux, .abi = .musl }), settings);
    const m = b.createModule(.{
        .target = b.resolveTargetQuery(.{ .cpu_arch = .aarch64, .os_tag = .freestanding, .abi = .none }),
        .optimize = settings.optimize,
        .strip = settings.strip,
        .sanitize_c = .off,
    });
    const folder = "tests/target/firmware/";
    m.addIncludePath(b.path("include"));
    m.addAssemblyFile(b.path(folder ++ "start.S"));
    const flags = &(c_flags ++ [_][]const u8{"-fno-builtin"});
    m.addCSourceFiles(.{ .files = &.{ folder ++ "firmware.c", folder ++ "libc.c" }, .flags = flags });
    m.addObjectFile(lib.getEmittedBin());
    const exe = b.addExecutable(.{ .name = "firmware.elf", .root_module = m });
    exe.setLinkerScript(b.path(folder ++ "link.ld"));
    exe.link_gc_sections = true;
    const install = b.addInstallArtifact(exe, .{ .dest_dir = .{ .override = .{ .custom = "tests" } } });
    b.step("firmware", "Build tests/target/firmware, for no system").dependOn(&install.step);
}

/// On Linux the tools are static musl executables whatever C library the target has: they run where nothing is installed.
fn addTools(b: *std.Build, query: std.Target.Query, static: *std.Build.Step.Compile, settings: Settings) void {
    var target = b.resolveTargetQuery(query);
    var lib = static;
    const linux = target.result.os.tag == .linux;
    if (linux and !target.result.abi.isMusl()) {
        var musl = query;
        musl.os_tag = .linux;
        musl.cpu_arch = target.result.cpu.arch;
        musl.abi = switch (target.result.abi) {
            .gnueabihf, .musleabihf => .musleabihf,
            .gnueabi, .musleabi => .musleabi,
            else => .musl,
        };
        musl.glibc_version = null;
        target = b.resolveTargetQuery(musl);
        lib = addStatic(b, target, settings);
    }
    for (tools) |tool| {
        if (target.result.os.tag == .wasi and tool.more.len > 0) continue; // colibri-bench measures with threads and mappings
        const file = b.fmt("tools/{s}.c", .{tool.name});
        const exe = addProgram(b, target, lib, settings, tool.name, file);
        exe.root_module.addCSourceFile(.{ .file = b.path("tools/cli_common.c"), .flags = &c_flags });
        for (tool.more) |more| exe.root_module.addCSourceFile(.{ .file = b.path(more), .flags = &c_flags });
        if (linux) exe.linkage = .static;
        b.installArtifact(exe);
    }
}

fn addTests(b: *std.Build, target: std.Build.ResolvedTarget, static: *std.Build.Step.Compile, settings: Settings) void {
    const step = b.step("test", "Build and run the C tests");
    const only_build = b.step("test-programs", "Build the C tests and the static library, to run them on another machine");
    only_build.dependOn(&b.addInstallArtifact(static, .{}).step);
    for (tests) |name| {
        if (settings.only) |only| for (only) |wanted| {
            if (std.mem.eql(u8, wanted, name)) break;
        } else continue;
        const file = b.fmt("tests/c/{s}.c", .{name});
        const exe = addProgram(b, target, static, settings, name, file);
        exe.root_module.addIncludePath(b.path("lib"));
        only_build.dependOn(&b.addInstallArtifact(exe, .{ .dest_dir = .{ .override = .{ .custom = "tests" } } }).step);
        if (std.mem.eql(u8, name, "test_amx") and target.result.cpu.arch == .x86_64) {
            const flags = withFeatures(b, &c_flags, comptime avx512 ++ [_][]const u8{"avx512vbmi"});
            exe.root_module.addCSourceFile(.{ .file = b.path("tests/kernels/amx_avx512.c"), .flags = flags });
        }
        if (settings.tsan and std.mem.eql(u8, name, "test_quiet")) continue; // it forbids what the sanitizer itself does
        const run = b.addRunArtifact(exe);
        run.expectStdErrMatch(", 0 failed"); // check.h's last line; captured, so that a passing test prints nothing
        run.expectExitCode(0);
        run.skip_foreign_checks = true; // a foreign target is only built, unless -fqemu and the like say how to run it
        step.dependOn(&run.step);
        if (std.mem.eql(u8, name, "test_golden")) {
            const print = b.addRunArtifact(exe);
            print.addArg("--print");
            b.step("golden", "Print new sums for tests/c/golden_sums.h").dependOn(&print.step);
        }
    }
    if (target.result.os.tag != .linux) return;
    const init = addProgram(b, target, static, settings, "numa-init", "tests/target/numa/init.c");
    init.root_module.addIncludePath(b.path("lib"));
    const install = b.addInstallArtifact(init, .{ .dest_dir = .{ .override = .{ .custom = "tests" } } });
    b.step("numa-init", "Build tests/target/numa/init.c, for Linux").dependOn(&install.step);
}

fn addProgram(
    b: *std.Build,
    target: std.Build.ResolvedTarget,
    static: *std.Build.Step.Compile,
    settings: Settings,
    name: []const u8,
    file: []const u8,
) *std.Build.Step.Compile {
    const m = settings.module(b, target);
    m.addCSourceFile(.{ .file = b.path(file), .flags = &c_flags });
    m.linkLibrary(static);
    const exe = b.addExecutable(.{ .name = name, .root_module = m });
    exe.link_gc_sections = true;
    return exe;
}
