//! Bytes, memory and threads of an agent.
