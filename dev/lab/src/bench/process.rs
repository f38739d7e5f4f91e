//! What another process has used, with all of its threads, even those that have ended.

use std::time::Duration;

use anyhow::Context as _;

/// Clock ticks per second in what the kernel reports: fixed, whatever its own tick is.
const TICKS_PER_SECOND: f64 = 100.0;

/// Returns the CPU time of the process `id` so far, in steps of 10 ms. Kernel threads that work for
/// it, such as io_uring's, count.
pub(super) fn cpu_time(id: u32) -> anyhow::Result<Duration> {
    let path = format!("/proc/{id}/stat");
    let stat = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let ticks = ticks_in(&stat).with_context(|| format!("{path} does not look as the kernel writes it"))?;
    Ok(Duration::from_secs_f64(ticks as f64 / TICKS_PER_SECOND))
}

/// Returns the bytes that the process `id` has read from disks and written to them. Fails for other users' processes.
pub(super) fn bytes_moved(id: u32) -> anyhow::Result<u64> {
    let path = format!("/proc/{id}/io");
    let io = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    bytes_moved_in(&io).with_context(|| format!("{path} does not look as the kernel writes it"))
}

fn bytes_moved_in(io: &str) -> Option<u64> {
    let field = |name| io.lines().find_map(|line| line.strip_prefix(name))?.trim().parse::<u64>().ok();
    field("read_bytes: ")?.checked_add(field("write_bytes: ")?)
}

/// Returns user and system time, fields 14 and 15. The name in field 2 may hold anything, even spaces and brackets.
fn ticks_in(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    // After the name, the first field is field 3.
    let mut fields = rest.split_whitespace().skip(14 - 3);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    user.checked_add(system)
}

#[cfg(test)]
mod tests {
    use super::{bytes_moved, bytes_moved_in, cpu_time, ticks_in};

    #[test]
    fn bytes_are_those_of_disks() {
        let io = "rchar: 4\nwchar: 3\nsyscr: 2\nsyscw: 1\nread_bytes: 8192\nwrite_bytes: 4096\n";
        assert_eq!(bytes_moved_in(io), Some(12_288));
        assert_eq!(bytes_moved_in("rchar: 4\n"), None);
        assert!(bytes_moved(std::process::id()).is_ok() && bytes_moved(u32::MAX).is_err());
    }

    #[test]
    fn times_are_found_behind_any_name() {
        let stat = "7 (a) b (c)) S 1 7 7 0 -1 4194560 9 0 0 0 123 45 0 0 20 0 3 0 100 1 1 1\n";
        assert_eq!(ticks_in(stat), Some(168));
        assert_eq!(ticks_in("7 (a) S 1 7"), None);
        assert_eq!(ticks_in(""), None);
    }

    #[test]
    fn a_process_that_works_uses_time() {
        let id = std::process::id();
        let before = cpu_time(id).unwrap();
        let mut number = 1_u64;
        while cpu_time(id).unwrap() == before {
            number = std::hint::black_box(number.wrapping_mul(3));
        }
        assert!(cpu_time(id).unwrap() > before);
        assert!(cpu_time(u32::MAX).is_err());
    }
}
