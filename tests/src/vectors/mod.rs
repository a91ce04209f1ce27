//! Runner for golden data.
