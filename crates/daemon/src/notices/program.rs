//! Runs an administrator's program for one notice.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use api::Notice;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};

use crate::config::program_problem;

/// How much of its standard error is kept, for a message.
const WORDS_BYTES_MAX: u64 = 2 << 10;
const LINES_MAX: usize = 5;
/// How long the last words of a program that has ended are waited for.
const LAST_WORDS: Duration = Duration::from_millis(50);

/// Runs the program with the notice on its standard input, and its fields in the environment. An error says why it failed.
pub(super) async fn run(program: &Path, notice: &Notice) -> Result<(), String> {
    let owned = program.to_owned();
    let problem = tokio::task::spawn_blocking(move || program_problem(&owned)).await;
    if let Some(problem) = problem.map_err(|error| error.to_string())? {
        return Err(format!("it cannot be run: {problem}"));
    }
    let body = serde_json::to_vec(notice).map_err(|error| error.to_string())?;
    let child = Command::new(program)
        .env("STERNA_NOTICE", notice.event.name())
        .env("STERNA_LEVEL", notice.level.name())
        .env("STERNA_PART", notice.part.name())
        .env("STERNA_NAME", notice.name.as_deref().unwrap_or_default())
        .env("STERNA_HOST", &notice.host)
        .env("STERNA_MESSAGE", &notice.message)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn();
    let mut running = Running(child.map_err(|error| format!("it cannot be started: {error}"))?);
    let (stdin, stderr) = (running.0.stdin.take(), running.0.stderr.take());
    let feed = async move {
        if let Some(mut stdin) = stdin {
            // It need not read it.
            let _ = stdin.write_all(&body).await;
        }
    };
    let mut words = Vec::new();
    let listen = async {
        if let Some(mut stderr) = stderr {
            // After an error what was read so far counts.
            let _ = (&mut stderr).take(WORDS_BYTES_MAX).read_to_end(&mut words).await;
            // It may have more to say, which nobody wants.
            let _ = tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await;
        }
        // Only its end counts.
        std::future::pending::<()>().await;
    };
    let ended = async {
        let status = running.0.wait().await;
        // Its last words may still be in the pipe. What it has left running may hold that for ever.
        tokio::time::sleep(LAST_WORDS).await;
        status
    };
    let status = tokio::select! {
        status = ended => status,
        _ = futures_util::future::join(feed, listen) => return Err("it cannot be heard".to_owned()),
    };
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => {
            let said = words::clean_lines(&String::from_utf8_lossy(&words), LINES_MAX);
            Err(if said.is_empty() { status.to_string() } else { format!("{status}, and it said: {said}") })
        }
        Err(error) => Err(format!("it cannot be waited for: {error}")),
    }
}

/// A program that is killed, with all that it has started, if nobody waits for it any more.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It has no number once it was waited for.
        let leader = self.0.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        if let Some(leader) = leader {
            // It may just have ended.
            let _ = kill_process_group(leader, Signal::KILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use api::{NoticeEvent, NoticeLevel, Part};

    use super::*;

    fn notice() -> Notice {
        Notice {
            id: "1".to_owned(),
            time_unix_ms: 1,
            host: "alpha".to_owned(),
            event: NoticeEvent::Begun,
            level: NoticeLevel::Problem,
            part: Part::Store,
            name: Some("fast; rm -r /".to_owned()),
            message: "it is full".to_owned(),
        }
    }

    async fn run_script(script: &str) -> (Result<(), String>, String) {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("tell");
        std::fs::write(&program, script.replace("OUT", &folder.path().join("out").display().to_string()))
            .unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let result = run(&program, &notice()).await;
        (result, std::fs::read_to_string(folder.path().join("out")).unwrap_or_default())
    }

    #[tokio::test]
    async fn the_program_gets_the_notice_and_its_fields() {
        let (result, out) =
            run_script("#!/bin/sh\ncat >OUT\necho \" $STERNA_NAME $STERNA_MESSAGE\" >>OUT\n").await;
        assert_eq!(result, Ok(()));
        let (json, fields) = out.split_once("} ").unwrap();
        assert_eq!(serde_json::from_str::<Notice>(&format!("{json}}}")).unwrap(), notice());
        assert_eq!(fields, "fast; rm -r / it is full\n");
    }

    #[tokio::test]
    async fn a_failure_has_its_last_words() {
        let (result, _) = run_script("#!/bin/sh\necho no mail >&2\nexit 3\n").await;
        assert_eq!(result, Err("exit status: 3, and it said: no mail".to_owned()));
        // What it leaves running is its own affair.
        let (result, _) = run_script("#!/bin/sh\nsleep 20 &\n").await;
        assert_eq!(result, Ok(()));
        // One that says more than anybody reads still ends.
        let (result, _) = run_script("#!/bin/sh\nhead -c 1000000 /dev/zero >&2\n").await;
        assert_eq!(result, Ok(()));
    }
}
