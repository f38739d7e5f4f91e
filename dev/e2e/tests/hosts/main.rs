//! Tests of volumes between paired hosts, with guests that know what they wrote.
//!
//! They are one program, because to link a program takes longer than most of them run.

mod attached;
mod branches;
mod dry_run;
mod evacuate;
mod forwarding;
mod ghosts;
mod home;
mod hooks;
mod moves;
mod pacing;
mod queue;
mod resume;
mod reverts;
mod standby_asks;
mod standby_compared;
mod standby_ends;
mod standby_exported;
mod standby_follows;
mod standby_reprotect;
mod standby_seeded;
mod standby_tests;
mod standbys;
mod together;
