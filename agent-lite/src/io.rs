//! hyper's I/O traits over tokio's.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A stream for hyper; reads go through a buffer of its own, since hyper's may be uninitialised and this crate has no
/// unsafe code.
pub(crate) struct Io<S> {
    stream: S,
    buffer: Box<[u8]>,
}

impl<S> Io<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, buffer: vec![0; BUFFER].into() }
    }
}

impl<S: AsyncRead + Unpin> hyper::rt::Read for Io<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut cursor: hyper::rt::ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { stream, buffer } = self.get_mut();
        let room = buffer.len().min(cursor.remaining());
        let mut read = ReadBuf::new(&mut buffer[..room]);
        ready!(Pin::new(stream).poll_read(context, &mut read))?;
        cursor.put_slice(read.filled());
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> hyper::rt::Write for Io<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

/// A TLS record is at most 16 KiB; most answers are smaller.
const BUFFER: usize = 8 << 10;
