//! A child process: its log, its signals, its memory.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::wait_for;

/// A program with its leading arguments, as a user gives it: `--agent 'argocd-agent agent'`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    words: Vec<String>,
}

impl CommandLine {
    pub fn new(program: impl Into<String>) -> Self {
        Self { words: vec![program.into()] }
    }

    pub fn program(&self) -> &str {
        &self.words[0]
    }

    pub fn words(&self) -> &[String] {
        &self.words
    }
}

impl FromStr for CommandLine {
    type Err = String;

    /// Splits at blanks; single and double quotes group. There is no other syntax.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = Vec::new();
        let mut word: Option<String> = None;
        let mut quote = None;
        for c in text.chars() {
            match (quote, c) {
                (Some(q), _) if c == q => quote = None,
                (None, '\'' | '"') => {
                    quote = Some(c);
                    word.get_or_insert_default();
                }
                (None, _) if c.is_whitespace() => words.extend(word.take()),
                _ => word.get_or_insert_default().push(c),
            }
        }
        if quote.is_some() {
            return Err(format!("unclosed quote in command line: {text}"));
        }
        words.extend(word);
        if words.is_empty() {
            return Err("empty command line".to_owned());
        }
        Ok(Self { words })
    }
}

/// A running program whose output goes to a file. Killed on drop, and by the kernel if this process dies.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// `arguments` and `environment` come after those of the command line and of this process. The log is
    /// appended to, so one file tells the story of a program across restarts.
    pub fn spawn(
        name: &str,
        command: &CommandLine,
        arguments: &[String],
        environment: &[(String, String)],
        log: &Path,
    ) -> io::Result<Self> {
        let output = File::options().create(true).append(true).open(log)?;
        let mut wrapped = Command::new("setpriv");
        // The child must not outlive a killed test run. Without unsafe code only an exec wrapper can say so.
        wrapped.args(["--pdeathsig", "KILL", "--"]);
        wrapped.args(command.words()).args(arguments);
        // Configuration meant for a shell's own kubectl must not leak into the peers.
        wrapped.env_remove("KUBECONFIG");
        wrapped.envs(environment.iter().map(|(key, value)| (key, value)));
        wrapped.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = spawn_from_lasting_thread(wrapped).map_err(|error| {
            io::Error::other(format!("cannot start {name} ({}): {error}", command.program()))
        })?;
        Ok(Self { name: name.to_owned(), child, log: log.to_owned() })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// `Some` when the program has ended.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// The last lines of the log: what a person wants to see when a step fails.
    pub fn log_tail(&self, lines: usize) -> String {
        let text = self.log_text();
        let all: Vec<String> = text.lines().map(|line| line.chars().take(400).collect()).collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }

    pub fn log_text(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// SIGKILL: a crash, or a power cut as far as the program can tell.
    pub fn kill(mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait().map(|_| ())
    }

    /// SIGTERM and the exit status, or an error when the program does not end in time (it is killed then).
    pub fn terminate(mut self, limit: Duration) -> io::Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        match wait_for(limit, || self.exited()) {
            Some(status) => Ok(status),
            None => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("{} did not end within {} s of SIGTERM", self.name, limit.as_secs()),
            )),
        }
    }

    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other("no such process"))?;
        Ok(kill_process(pid, signal)?)
    }

    pub fn memory(&self) -> io::Result<Memory> {
        Memory::of(self.pid())
    }

    /// Waits for a condition, but no longer than the program lives.
    pub fn wait_while_alive<T>(
        &mut self,
        limit: Duration,
        what: &str,
        mut condition: impl FnMut() -> Option<T>,
    ) -> Result<T, String> {
        let outcome = wait_for(limit, || match condition() {
            Some(value) => Some(Ok(value)),
            None => self.exited().map(Err),
        });
        match outcome {
            Some(Ok(value)) => Ok(value),
            Some(Err(status)) => Err(format!(
                "{} ended ({}) before {what}; its last words:\n{}",
                self.name,
                describe(status),
                self.log_tail(15)
            )),
            None => Err(format!(
                "{}: no {what} within {} s; its last words:\n{}",
                self.name,
                limit.as_secs(),
                self.log_tail(15)
            )),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the kernel says about a process, from `/proc`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    pub rss_kib: u64,
    pub anon_kib: u64,
    pub peak_kib: u64,
    pub threads: u64,
    /// Times that a thread went to sleep of its own will: each one is a wake-up later.
    pub voluntary_switches: u64,
}

impl Memory {
    pub fn of(pid: u32) -> io::Result<Self> {
        let mut memory = Self::default();
        for line in fs::read_to_string(format!("/proc/{pid}/status"))?.lines() {
            let Some((key, value)) = line.split_once(':') else { continue };
            let number = value.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0);
            match key {
                "VmRSS" => memory.rss_kib = number,
                "RssAnon" => memory.anon_kib = number,
                "VmHWM" => memory.peak_kib = number,
                "Threads" => memory.threads = number,
                _ => {}
            }
        }
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            // A thread may end between the listing and the reading.
            let Ok(status) = fs::read_to_string(task?.path().join("status")) else { continue };
            let switches = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            memory.voluntary_switches += switches.and_then(|n| n.trim().parse::<u64>().ok()).unwrap_or(0);
        }
        Ok(memory)
    }
}

/// Samples a process until dropped; knows the highest RSS it saw.
#[derive(Debug)]
pub struct MemoryWatch {
    highest_kib: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl MemoryWatch {
    pub fn start(pid: u32) -> Self {
        let highest_kib = Arc::new(AtomicU64::new(0));
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let (highest, stop) = (highest_kib.clone(), stop.clone());
            move || {
                while !stop.load(Ordering::Relaxed) {
                    let Ok(memory) = Memory::of(pid) else { break };
                    highest.fetch_max(memory.rss_kib, Ordering::Relaxed);
                    thread::park_timeout(Duration::from_millis(100));
                }
            }
        });
        Self { highest_kib, stop, thread: Some(thread) }
    }

    pub fn highest_kib(&self) -> u64 {
        self.highest_kib.load(Ordering::Relaxed)
    }
}

impl Drop for MemoryWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "unknown status".to_owned(),
    }
}

/// The parent-death signal is sent when the *thread* that forked ends, and a test's thread ends with the
/// test; so one thread that never ends does all the forking.
fn spawn_from_lasting_thread(command: Command) -> io::Result<Child> {
    type Job = (Command, mpsc::Sender<io::Result<Child>>);
    static SPAWNER: OnceLock<mpsc::Sender<Job>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (jobs, inbox) = mpsc::channel::<Job>();
        thread::spawn(move || {
            for (mut command, answer) in inbox {
                let _ = answer.send(command.spawn());
            }
        });
        jobs
    });
    let (answer, result) = mpsc::channel();
    let gone = || io::Error::other("the spawning thread has ended");
    spawner.send((command, answer)).map_err(|_| gone())?;
    result.recv().map_err(|_| gone())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_split_at_blanks_and_honour_quotes() {
        let words = |text: &str| text.parse::<CommandLine>().map(|c| c.words);
        assert_eq!(words("a  b"), Ok(vec!["a".into(), "b".into()]));
        assert_eq!(words("'a b' \"c d\"e ''"), Ok(vec!["a b".into(), "c de".into(), String::new()]));
        assert!(words(" ").is_err());
        assert!(words("'a").is_err());
    }

    #[test]
    fn a_process_is_watched_and_terminated() {
        let dir = super::super::WorkDir::new("process-test").unwrap();
        let log = dir.join("log");
        let shell: CommandLine = "sh -c 'echo here; exec sleep 100'".parse().unwrap();
        let mut process = Process::spawn("sleeper", &shell, &[], &[], &log).unwrap();
        let limit = Duration::from_secs(10);
        process.wait_while_alive(limit, "greeting", || process_said(&log, "here")).unwrap();
        assert!(process.memory().unwrap().rss_kib > 0);
        let status = process.terminate(limit).unwrap();
        assert_eq!(status.signal(), Some(15));
    }

    #[test]
    fn an_early_end_is_told_with_the_last_words() {
        let dir = super::super::WorkDir::new("process-test").unwrap();
        let shell: CommandLine = "sh -c 'echo no such flag; exit 3'".parse().unwrap();
        let mut process = Process::spawn("peer", &shell, &[], &[], &dir.join("log")).unwrap();
        let error = process.wait_while_alive(Duration::from_secs(10), "health", || None::<()>).unwrap_err();
        assert!(error.contains("exit code 3") && error.contains("no such flag"), "{error}");
    }

    fn process_said(log: &Path, word: &str) -> Option<()> {
        fs::read_to_string(log).ok()?.contains(word).then_some(())
    }
}
