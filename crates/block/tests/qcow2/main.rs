//! Tests qcow2 images by QEMU's own tools: `qemu-img` finds them clean and equal to a raw model.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot prepare its scene, or whose tool finds a fault, has failed"
)]

mod chains;
mod content;
mod crash;
mod full;
mod hostile;
mod power;
mod tools;
