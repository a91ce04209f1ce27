//! A stand-in for Argo CD's application controller.
