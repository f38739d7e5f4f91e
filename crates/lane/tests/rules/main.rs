//! The rules of the design's section 5 that one host can break, on a clock that jumps. Each test fails when its
//! rule is broken (`docs/invariants.md`).

mod chronicle;
mod elastic;
mod fences;
mod filters;
mod growth;
mod home;
mod migrations;
mod peers;
mod reservoir;
mod support;
mod together;
