//! Tests of what shows a person the daemon's work: the page, the report and `sterna top`.
//!
//! They are one program, because to link a program takes longer than most of them run.

mod page;
mod page_host;
mod page_orders;
mod page_port;
mod report;
mod top;
