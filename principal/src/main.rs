//! The hub half.

fn main() -> std::process::ExitCode {
    principal::run::main()
}
