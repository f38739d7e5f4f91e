//! Requests and responses of the HTTP API, and a client for it.
