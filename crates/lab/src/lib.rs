//! Workloads and the demo: guests that know what they wrote.
