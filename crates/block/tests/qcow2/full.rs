//! Tests a full file system: the guest gets an error, and the image stays valid.

use std::path::Path;
use std::process::Command;

use block::engine::EngineChoice;
use block::store::qcow2::Qcow2Image;
use block::{BlockDevice, Buffer, ByteRange, Durability};

use crate::tools::{alone, check_clean, check_equal, on_engine};

const FOLDER_VARIABLE: &str = "STERNA_TEST_SMALL_FOLDER";

const PIECE: u64 = 64 << 10;

/// Mounts a file system of 6 MiB that only a child sees, and has the child fill it.
#[test]
fn a_full_file_system_is_told_and_damages_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let script = "mount -t tmpfs -o size=6m none \"$1\" || exit 77; exec \"$2\" --exact full::fills_its_file_system --nocapture";
    let output = Command::new("unshare")
        .args(["-rm", "sh", "-c", script, "sh"])
        .arg(folder.path())
        .arg(std::env::current_exe().unwrap())
        .env(FOLDER_VARIABLE, folder.path())
        .output();
    let Ok(output) = output else { return omission::machine_lacks("unshare, of the package util-linux") };
    let told =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.code() == Some(77) || told.contains("unshare failed") {
        return omission::machine_lacks("the right to mount");
    }
    assert!(output.status.success() && told.contains("1 passed"), "{told}");
}

/// In the child. In the suite, without a folder, it does nothing.
#[test]
fn fills_its_file_system() {
    let Ok(folder) = std::env::var(FOLDER_VARIABLE) else { return };
    for choice in [EngineChoice::Ring, EngineChoice::Threads] {
        let path = Path::new(&folder).join("disk.qcow2");
        on_engine(choice, move |lane| {
            let path = path.clone();
            async move {
                let size = 32_u64 << 20;
                let mut model = vec![0; size as usize];
                let device = lane.serve(Qcow2Image::create(&path, size, &alone(PIECE)).unwrap()).await;
                let data = || Buffer::copy_of(&[7; PIECE as usize]);
                let mut refused = 0;
                for piece in 0..size / PIECE {
                    match device.write(piece * PIECE, data(), Durability::Volatile).await {
                        Ok(()) => model[(piece * PIECE) as usize..][..PIECE as usize].fill(7),
                        Err(error) => {
                            assert!(error.is_no_space(), "{error}");
                            refused += 1;
                        }
                    }
                }
                assert!(refused > 400, "{refused}");
                assert!(device.flush().await.is_ok_and(|()| true) || refused > 0);
                // Room is made as a guest would: by discarding.
                device.discard(ByteRange::new(0, 4 * PIECE)).await.unwrap();
                model[..4 * PIECE as usize].fill(0);
                device.flush().await.unwrap();
                device.write(size - PIECE, data(), Durability::Durable).await.unwrap();
                model[(size - PIECE) as usize..].fill(7);
                drop(device);
                check_clean(&path);
                // The model has no room beside it.
                device_equals(&lane, &path, &model).await;
                std::fs::remove_file(&path).unwrap();
            }
        });
    }
}

async fn device_equals(lane: &crate::tools::Lane, path: &Path, model: &[u8]) {
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("full-{}.qcow2", std::process::id()));
    std::fs::copy(path, &copy).unwrap();
    check_equal(&copy, model);
    std::fs::remove_file(copy).unwrap();
    let device = lane.open(path, block::Access::ReadOnly).await;
    assert!(crate::tools::read(&device, 0, model.len()).await == model);
}
