//! Tests of a system with systemd on an overlay of `/`: the package, and the commands of the documents.
//!
//! They are one program, because to link a program takes longer than most of them run.

mod documents;
mod operate;
mod package;
mod pages;
mod restart;
