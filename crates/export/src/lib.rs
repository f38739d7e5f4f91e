//! What a guest talks to: the NBD server.
