//! The VM's TPM, if it has one: used and checked all the time. This reveals a TPM whose state was moved wrongly, or together with
//! other memory than its own.
//!
//! A register that can only be extended, and is empty after a reset, shows that the TPM's volatile state belongs to this run. A
//! counter that only grows, and survives a reset, shows that its persistent state is the latest. The VM's memory holds the
//! expected values. The commands are those of the TPM 2.0 library specification, part 3.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::time::Duration;

use crate::say;
use crate::tally::Tally;

const DEVICE: &str = "/dev/tpm0";
/// Pause between two uses, each of which rewrites the TPM's persistent state.
const PAUSE: Duration = Duration::from_millis(50);
/// The register for debugging, which neither firmware nor kernel uses.
const REGISTER: u8 = 16;
/// A counter among those that an owner defines.
const COUNTER: u32 = 0x0180_0001;
/// TPMA_NV: a counter that the owner reads and writes, and that wrong passwords do not lock.
const COUNTER_ATTRIBUTES: u32 = 0x0202_0012;
const COUNTER_BYTES: u16 = 8;
const OWNER: u32 = 0x4000_0001;
/// The authorisation with an empty password.
const PASSWORD: [u8; 9] = [0x40, 0, 0, 0x09, 0, 0, 0, 0, 0];
const SHA256: u16 = 0x000b;
const DIGEST_BYTES: usize = 32;
const HEAD_BYTES: usize = 10;
const RESPONSE_BYTES_MAX: usize = 4096;
const ALREADY_DEFINED: u32 = 0x014c;

pub(crate) struct Tpm {
    device: File,
    register: [u8; DIGEST_BYTES],
    counter: u64,
}

impl Tpm {
    /// Opens the TPM and prints the value of its counter; `None`: the VM has no TPM.
    pub(crate) fn find() -> Result<Option<Self>, String> {
        let device = match File::options().read(true).write(true).open(DEVICE) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            device => device.map_err(|error| format!("{DEVICE}: {error}"))?,
        };
        let mut tpm = Self { device, register: [0; DIGEST_BYTES], counter: 0 };
        match tpm.ask(&define_counter()) {
            Ok(_) | Err(Refused::Code(ALREADY_DEFINED)) => {}
            Err(refused) => return Err(refused.told("to define a counter")),
        }
        tpm.count().map_err(|refused| refused.told("to count"))?;
        tpm.counter = tpm.read_counter().map_err(|refused| refused.told("its counter"))?;
        tpm.register = tpm.read_register().map_err(|refused| refused.told("its register"))?;
        say(&format!("tpm counter={}", tpm.counter));
        Ok(Some(tpm))
    }

    /// Uses and checks the TPM until the tally is stopped.
    pub(crate) fn work(&mut self, tally: &Tally) {
        while !tally.is_stopped() {
            if let Err(wrong) = self.turn() {
                tally.wrong(&format!("TPM: {wrong}"));
            }
            std::thread::sleep(PAUSE);
        }
        say(&format!("tpm counter={}", self.counter));
    }

    fn turn(&mut self) -> Result<(), String> {
        let (register, counter) = (self.read_register(), self.read_counter());
        let register = register.map_err(|refused| refused.told("its register"))?;
        let counter = counter.map_err(|refused| refused.told("its counter"))?;
        let expected =
            (std::mem::replace(&mut self.register, register), std::mem::replace(&mut self.counter, counter));
        self.extend().map_err(|refused| refused.told("to extend"))?;
        self.register = self.read_register().map_err(|refused| refused.told("its register"))?;
        self.count().map_err(|refused| refused.told("to count"))?;
        self.counter += 1;
        match expected {
            (expected, _) if expected != register => {
                Err(format!("its register is {register:02x?}, not {expected:02x?}"))
            }
            (_, expected) if expected != counter => Err(format!("its counter is {counter}, not {expected}")),
            _ => Ok(()),
        }
    }

    fn extend(&mut self) -> Result<(), Refused> {
        let mut digest = [0; DIGEST_BYTES];
        digest[..8].copy_from_slice(&self.counter.to_be_bytes());
        let values = [&1_u32.to_be_bytes()[..], &SHA256.to_be_bytes(), &digest].concat();
        self.ask(&command(0x0182, &[u32::from(REGISTER)], Some(&PASSWORD), &values)).map(drop)
    }

    fn read_register(&mut self) -> Result<[u8; DIGEST_BYTES], Refused> {
        let mut selected = [0; 3];
        selected[usize::from(REGISTER / 8)] = 1 << (REGISTER % 8);
        let selection = [&1_u32.to_be_bytes()[..], &SHA256.to_be_bytes(), &[3], &selected].concat();
        let answer = self.ask(&command(0x017e, &[], None, &selection))?;
        // The digest is at the end.
        answer.last_chunk().copied().ok_or(Refused::Short)
    }

    fn count(&mut self) -> Result<(), Refused> {
        self.ask(&command(0x0134, &[OWNER, COUNTER], Some(&PASSWORD), &[])).map(drop)
    }

    fn read_counter(&mut self) -> Result<u64, Refused> {
        let what = [COUNTER_BYTES.to_be_bytes(), 0_u16.to_be_bytes()].concat();
        let answer = self.ask(&command(0x014e, &[OWNER, COUNTER], Some(&PASSWORD), &what))?;
        // The length of the parameters, that of the value, the value, and the password's part.
        let value = answer.get(6..14).and_then(<[u8]>::first_chunk);
        value.map(|bytes| u64::from_be_bytes(*bytes)).ok_or(Refused::Short)
    }

    /// Sends a command and returns the response after its head.
    fn ask(&mut self, command: &[u8]) -> Result<Vec<u8>, Refused> {
        self.device.write_all(command).map_err(Refused::Device)?;
        let mut response = vec![0; RESPONSE_BYTES_MAX];
        let length = self.device.read(&mut response).map_err(Refused::Device)?;
        response.truncate(length);
        let code = response.get(6..HEAD_BYTES).and_then(<[u8]>::first_chunk).ok_or(Refused::Short)?;
        match u32::from_be_bytes(*code) {
            0 => Ok(response.split_off(HEAD_BYTES)),
            code => Err(Refused::Code(code)),
        }
    }
}

#[derive(Debug)]
enum Refused {
    Device(io::Error),
    Short,
    Code(u32),
}

impl Refused {
    fn told(&self, what: &str) -> String {
        match self {
            Self::Device(error) => format!("{what}: {error}"),
            Self::Short => format!("{what}: its response is cut"),
            Self::Code(code) => format!("{what}: it answers {code:#x}"),
        }
    }
}

fn define_counter() -> Vec<u8> {
    let public = [
        &COUNTER.to_be_bytes()[..],
        &SHA256.to_be_bytes(),
        &COUNTER_ATTRIBUTES.to_be_bytes(),
        // No policy.
        &0_u16.to_be_bytes(),
        &COUNTER_BYTES.to_be_bytes(),
    ]
    .concat();
    let length = public.len() as u16;
    // No password of its own.
    let parameters = [&0_u16.to_be_bytes()[..], &length.to_be_bytes(), &public].concat();
    command(0x012a, &[OWNER], Some(&PASSWORD), &parameters)
}

fn command(code: u32, handles: &[u32], authorisation: Option<&[u8]>, parameters: &[u8]) -> Vec<u8> {
    let mut rest: Vec<u8> = handles.iter().flat_map(|handle| handle.to_be_bytes()).collect();
    if let Some(authorisation) = authorisation {
        rest.extend((authorisation.len() as u32).to_be_bytes());
        rest.extend(authorisation);
    }
    rest.extend(parameters);
    let tag: u16 = if authorisation.is_some() { 0x8002 } else { 0x8001 };
    let length = (HEAD_BYTES + rest.len()) as u32;
    [&tag.to_be_bytes()[..], &length.to_be_bytes(), &code.to_be_bytes(), &rest].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_say_how_long_they_are() {
        let extend = command(0x0182, &[16], Some(&PASSWORD), &[0xab; 38]);
        assert_eq!(extend.len(), 65);
        assert_eq!(extend[..14], [0x80, 2, 0, 0, 0, 65, 0, 0, 1, 0x82, 0, 0, 0, 16]);
        assert_eq!(command(0x017e, &[], None, &[]), [0x80, 1, 0, 0, 0, 10, 0, 0, 1, 0x7e]);
        let define = define_counter();
        assert_eq!(define.len(), 45);
        assert_eq!(define[27..31], [0, 0, 0, 14]);
    }
}
