//! List and watch as a machine over abstract responses.
