//! The link between a site and the hub: a TCP forwarder that can be cut, hung and healed.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{mem, thread};

use socket2::SockRef;

/// Forwards connections to one address and counts their bytes.
#[derive(Debug)]
pub struct Link {
    address: SocketAddr,
    shared: Arc<Shared>,
}

/// Bytes carried since the start, as TCP payload (TLS included).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// From the side that dials.
    pub up: u64,
    pub down: u64,
    pub connections: u64,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    up: AtomicU64,
    down: AtomicU64,
    connections: AtomicU64,
}

#[derive(Debug)]
struct State {
    mode: Mode,
    /// Both ends of every open connection, by its number. A handle here keeps a socket from being closed.
    open: BTreeMap<u64, [TcpStream; 2]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Forward,
    /// Nothing passes and nobody is told: a dead radio link.
    Hang,
    /// Existing connections were reset, new ones are as well.
    Cut,
    Closed,
}

impl Link {
    pub fn start(target: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            state: Mutex::new(State { mode: Mode::Forward, open: BTreeMap::new() }),
            changed: Condvar::new(),
            up: AtomicU64::new(0),
            down: AtomicU64::new(0),
            connections: AtomicU64::new(0),
        });
        thread::spawn({
            let shared = shared.clone();
            move || accept(&listener, target, &shared)
        });
        Ok(Self { address, shared })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn traffic(&self) -> Traffic {
        Traffic {
            up: self.shared.up.load(Ordering::Relaxed),
            down: self.shared.down.load(Ordering::Relaxed),
            connections: self.shared.connections.load(Ordering::Relaxed),
        }
    }

    /// Resets every connection, and every new one until healed.
    pub fn cut(&self) {
        self.set(Mode::Cut);
    }

    /// Stops carrying bytes without telling either end.
    pub fn hang(&self) {
        self.set(Mode::Hang);
    }

    pub fn heal(&self) {
        self.set(Mode::Forward);
    }

    fn set(&self, mode: Mode) {
        let mut state = self.shared.lock();
        state.mode = mode;
        if matches!(mode, Mode::Cut | Mode::Closed) {
            for end in mem::take(&mut state.open).values().flatten() {
                reset(end);
            }
        }
        self.shared.changed.notify_all();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.set(Mode::Closed);
        // Wakes the accepting thread, which then sees that the link is closed.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks while the link hangs; false when the connection should end.
    fn may_pass(&self) -> bool {
        let mut state = self.lock();
        while state.mode == Mode::Hang {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.mode == Mode::Forward
    }
}

fn accept(listener: &TcpListener, target: SocketAddr, shared: &Arc<Shared>) {
    for client in listener.incoming() {
        let Ok(client) = client else { continue };
        let mode = shared.lock().mode;
        match mode {
            Mode::Closed => return,
            Mode::Cut => {
                reset(&client);
                continue;
            }
            Mode::Forward | Mode::Hang => {}
        }
        let shared = shared.clone();
        thread::spawn(move || {
            if shared.may_pass() {
                let _ = carry(client, target, &shared);
            } else {
                reset(&client);
            }
        });
    }
}

fn carry(client: TcpStream, target: SocketAddr, shared: &Arc<Shared>) -> io::Result<()> {
    let server = TcpStream::connect_timeout(&target, Duration::from_secs(5))?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let number = shared.connections.fetch_add(1, Ordering::Relaxed);
    {
        let mut state = shared.lock();
        if state.mode == Mode::Cut {
            reset(&client);
            return Ok(());
        }
        state.open.insert(number, [client.try_clone()?, server.try_clone()?]);
    }
    let up = thread::spawn({
        let (from, to, shared) = (client.try_clone()?, server.try_clone()?, shared.clone());
        move || pump(from, to, &shared, |shared| &shared.up)
    });
    pump(server, client, shared, |shared| &shared.down);
    let _ = up.join();
    shared.lock().open.remove(&number);
    Ok(())
}

fn pump(mut from: TcpStream, mut to: TcpStream, shared: &Shared, counter: fn(&Shared) -> &AtomicU64) {
    let mut buffer = [0; 16 * 1024];
    loop {
        let read = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(_) => {
                // A reset travels on as a reset.
                reset(&to);
                return;
            }
        };
        if !shared.may_pass() {
            reset(&from);
            return;
        }
        // Counted first: whoever has received a byte finds it counted.
        counter(shared).fetch_add(read as u64, Ordering::Relaxed);
        if to.write_all(&buffer[..read]).is_err() {
            reset(&from);
            return;
        }
    }
    if shared.may_pass() {
        let _ = to.shutdown(Shutdown::Write);
    } else {
        reset(&to);
    }
}

/// RST instead of FIN: what a peer sees when a middlebox forgot the connection. It is sent when the last
/// handle is closed; ending the reads makes the pumps let go of theirs.
fn reset(stream: &TcpStream) {
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
    let _ = stream.shutdown(Shutdown::Read);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_forwards_hangs_cuts_and_heals() {
        let link = echo_behind_link();
        let mut client = connect(&link);
        assert_eq!(ask(&mut client), Some(b'x'));
        let before = link.traffic();
        assert_eq!((before.up, before.down), (1, 1));

        link.hang();
        client.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        assert_eq!(ask(&mut client), None, "nothing passes a hung link");
        link.heal();
        client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();

        link.cut();
        assert!(matches!(client.read(&mut byte), Ok(0) | Err(_)), "a cut ends the connection");
        let mut refused = connect(&link);
        assert_eq!(ask(&mut refused), None, "a cut link carries nothing new");
        link.heal();
        assert_eq!(ask(&mut connect(&link)), Some(b'x'));
    }

    #[test]
    fn a_server_that_dies_is_felt_through_the_link() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let link = Link::start(listener.local_addr().unwrap()).unwrap();
        let mut client = connect(&link);
        client.write_all(b"unread").unwrap();
        let (mut server, _) = listener.accept().unwrap();
        server.read_exact(&mut [0]).unwrap();
        // Closed with bytes unread: the kernel resets, as it does when a process is killed.
        drop(server);
        let end = client.read(&mut [0]);
        let timed_out = end.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        assert!(!timed_out, "the client waits for a server that is gone: {end:?}");
    }

    fn echo_behind_link() -> Link {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                thread::spawn(move || {
                    let mut byte = [0];
                    while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {}
                });
            }
        });
        Link::start(address).unwrap()
    }

    fn connect(link: &Link) -> TcpStream {
        let stream = TcpStream::connect(link.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        stream
    }

    fn ask(stream: &mut TcpStream) -> Option<u8> {
        let mut byte = [0];
        stream.write_all(b"x").ok()?;
        stream.read_exact(&mut byte).ok()?;
        Some(byte[0])
    }
}
