//! Faults put in on purpose, to show that the checker sees them. They sit around the halves: the product has no hooks.

use agent_core::cloudevent::EventView;
use agent_core::event::{EventType, Target, Type};

/// A planted fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Plant {
    /// One delete is acknowledged and not carried out.
    DropOneDelete,
    /// A list without items is taken for the deletion of everything.
    DeleteOnEmptyList,
    /// The agent acknowledges on arrival.
    AckBeforeApply,
    /// The principal keeps no operation: it reads it when it sends, and a status of the site clears it.
    OperationAtSendTime,
}

impl Plant {
    pub const ALL: [Self; 4] =
        [Self::DropOneDelete, Self::DeleteOnEmptyList, Self::AckBeforeApply, Self::OperationAtSendTime];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::DropOneDelete => "drop-one-delete",
            Self::DeleteOnEmptyList => "delete-on-empty-list",
            Self::AckBeforeApply => "ack-before-apply",
            Self::OperationAtSendTime => "operation-at-send-time",
        }
    }

    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|plant| plant.as_str() == word)
    }
}

/// What a frame is, for those who look at it on its way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FrameKind {
    Ack,
    Application(Type),
    Other,
}

pub(super) fn frame_kind(frame: &[u8]) -> FrameKind {
    match EventView::decode(frame) {
        Ok(event) if event.is_ack() => FrameKind::Ack,
        Ok(event) => match (event.target(), event.event_type()) {
            (Some(Target::Application), EventType::Known(kind)) => FrameKind::Application(kind),
            _ => FrameKind::Other,
        },
        Err(_) => FrameKind::Other,
    }
}

/// An acknowledgement of `frame` that its receiver never gave.
pub(super) fn forged_ack(frame: &[u8]) -> Option<Vec<u8>> {
    EventView::decode(frame).ok().map(|event| event.ack("agent"))
}
