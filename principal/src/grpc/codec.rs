//! Messages of the unary calls, and the event stream's messages as bytes.

use std::marker::PhantomData;

use bytes::{Buf as _, BufMut as _, Bytes};
use prost::Message;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// Protobuf messages: `A` is received, `B` sent.
pub(super) struct Messages<A, B>(PhantomData<(A, B)>);

impl<A, B> Default for Messages<A, B> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<A: Message + Default + Send + 'static, B: Message + Send + 'static> Codec for Messages<A, B> {
    type Encode = B;
    type Decode = A;
    type Encoder = MessageEncoder<B>;
    type Decoder = MessageDecoder<A>;

    fn encoder(&mut self) -> Self::Encoder {
        MessageEncoder(PhantomData)
    }

    fn decoder(&mut self) -> Self::Decoder {
        MessageDecoder(PhantomData)
    }
}

pub(super) struct MessageEncoder<B>(PhantomData<B>);

impl<B: Message> Encoder for MessageEncoder<B> {
    type Item = B;
    type Error = Status;

    fn encode(&mut self, item: B, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        item.encode(buffer).map_err(|error| Status::internal(error.to_string()))
    }
}

pub(super) struct MessageDecoder<A>(PhantomData<A>);

impl<A: Message + Default> Decoder for MessageDecoder<A> {
    type Item = A;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<A>, Status> {
        A::decode(buffer).map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

/// The event stream: the core reads and writes the bytes itself.
#[derive(Default)]
pub(super) struct Frames;

impl Codec for Frames {
    type Encode = Vec<u8>;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Frames {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Frames {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}
