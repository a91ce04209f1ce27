//! `vectors PATH…`: runs vector files or directories, and the directory that `VECTORS_DIR` names.

use std::path::PathBuf;
use std::process::ExitCode;

use harness::vectors::{Totals, files, run_file};

#[expect(clippy::print_stdout, clippy::print_stderr, reason = "this is the program's output")]
fn main() -> ExitCode {
    let mut paths: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    if let Some(directory) = std::env::var_os("VECTORS_DIR").filter(|directory| !directory.is_empty()) {
        paths.push(directory.into());
    }
    if paths.is_empty() {
        eprintln!("usage: vectors PATH… (a vector file or a directory of them; VECTORS_DIR adds one)");
        return ExitCode::from(2);
    }
    let mut totals = Totals::default();
    for path in paths {
        match files(&path) {
            Ok(files) => {
                for file in files {
                    let of_file = run_file(&file);
                    println!("{}: {}", file.display(), of_file.line());
                    for failure in &of_file.failures {
                        println!("  FAILED {failure}");
                    }
                    totals.add(of_file);
                }
            }
            Err(error) => {
                println!("  FAILED {error}");
                totals.failures.push(error);
            }
        }
    }
    let sum = |counts: &mut dyn Iterator<Item = usize>| counts.sum::<usize>();
    println!(
        "{} deviations, {} later",
        sum(&mut totals.deviations.values().copied()),
        sum(&mut totals.later.values().copied())
    );
    println!("{} passed, {} failed", totals.passed, totals.failures.len());
    if totals.failures.is_empty() && totals.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
