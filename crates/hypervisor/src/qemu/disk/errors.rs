//! QEMU's treatment of a guest when a disk answers with an error.

use serde_json::json;

use super::LocalDisk;
use crate::HypervisorError;
use crate::qemu::command_line::{Values, parse};
use crate::qemu::process::{ANSWER_DEADLINE, Qemu};

/// Stops the guest, and repeats the request when the guest is resumed.
const STOP: &str = "stop";
const AUTO: &str = "auto";
const READS: &str = "rerror";
const WRITES: &str = "werror";

impl Qemu {
    /// Returns whether QEMU stops the guest at each error of a disk, and repeats the request when the guest is resumed
    /// (`rerror=stop,werror=stop`). `command`: QEMU's own, with its program. False for a device without such a setting.
    pub async fn stops_at_errors(
        &self,
        disk: &LocalDisk,
        command: &[String],
    ) -> Result<bool, HypervisorError> {
        for what in [READS, WRITES] {
            let is_asked = what == READS || !disk.options.is_read_only;
            if is_asked && !self.stops_at(disk, what, command).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn stops_at(
        &self,
        disk: &LocalDisk,
        what: &str,
        command: &[String],
    ) -> Result<bool, HypervisorError> {
        let asked = json!({ "path": disk.device, "property": what });
        let answer = self.qmp().execute("qom-get", asked, ANSWER_DEADLINE).await;
        match answer.map_err(HypervisorError::from) {
            Ok(policy) if policy == AUTO => Ok(of_drive(command, &disk.drive, what).as_deref() == Some(STOP)),
            Ok(policy) => Ok(policy == STOP),
            // Some devices do not have it.
            Err(HypervisorError::Refused(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn of_drive(command: &[String], drive: &str, what: &str) -> Option<String> {
    let words = command.get(1..).unwrap_or_default();
    let drives = parse(words).into_iter().filter(|argument| argument.option == "-drive");
    let mut drives = drives.filter_map(|argument| Some(Values::read(&argument.value?)));
    drives.find(|values| values.get("id").as_deref() == Some(drive))?.get(what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_drive_says_is_found_by_its_name() {
        let command = ["qemu", "-drive", "id=a,file=x", "-drive", "file=y,id=b,rerror=stop,werror=enospc"];
        let command = command.map(str::to_owned);
        assert_eq!(of_drive(&command, "b", READS).as_deref(), Some(STOP));
        assert_eq!(of_drive(&command, "b", WRITES).as_deref(), Some("enospc"));
        assert_eq!(of_drive(&command, "a", READS), None);
        assert_eq!(of_drive(&command, "", READS), None);
    }
}
