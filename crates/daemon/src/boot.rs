//! Which start of the machine this is.

/// The kernel's random number of the machine's present start.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Returns the identity of the machine's present start; `None`: the kernel does not say it.
pub(crate) fn identity() -> Option<String> {
    let text = std::fs::read_to_string(BOOT_ID).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}
