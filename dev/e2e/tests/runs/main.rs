//! Short runs from fixed seeds. The programs of the same names make long ones.
//!
//! They are one program, because to link a program takes longer than most of them run.

mod restores;
mod rounds;
mod switch_over;
mod tour;
