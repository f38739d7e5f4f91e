//! Workloads and the demo: guests that know what they wrote.

pub mod demo;
pub mod nbd_client;
pub mod vm;
pub mod workload;
