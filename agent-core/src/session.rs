//! When to dial, how to authenticate, what a failure means.
