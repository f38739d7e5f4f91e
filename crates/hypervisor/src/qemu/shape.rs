//! What a VM is made of, and what a QEMU could make: types of VMs, models of processors.

use serde_json::{Value, json};

use super::process::{ANSWER_DEADLINE, Qemu, unexpected};
use crate::HypervisorError;

/// What QEMU adds to the name of a VM's type where it tells the type of the object.
const TYPE_SUFFIX: &str = "-machine";

/// A type of VM that a QEMU could make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineType {
    /// Its full name, with a version where it has one.
    pub name: String,
    /// A shorter name, which means another type in another version of QEMU.
    pub alias: Option<String>,
}

/// A model of processor that a QEMU could make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessorModel {
    /// Its name.
    pub name: String,
    /// What of it this host cannot do, by QEMU's names of features.
    pub unavailable: Vec<String>,
}

impl Qemu {
    /// The full name of the VM's type, whatever it was called at its start.
    ///
    /// # Errors
    /// If QEMU does not tell.
    pub async fn machine_type(&self) -> Result<String, HypervisorError> {
        let arguments = json!({ "path": "/machine", "property": "type" });
        let answer = self.qmp().execute("qom-get", arguments, ANSWER_DEADLINE).await?;
        let name = answer.as_str().map(|name| name.strip_suffix(TYPE_SUFFIX).unwrap_or(name).to_owned());
        Ok(name.ok_or_else(|| unexpected("qom-get", "a type"))?)
    }

    /// Bytes of the guest's memory, as it is now.
    ///
    /// # Errors
    /// If QEMU does not tell.
    pub async fn memory_bytes(&self) -> Result<u64, HypervisorError> {
        const COMMAND: &str = "query-memory-size-summary";
        let answer = self.ask(COMMAND).await?;
        let base = answer["base-memory"].as_u64().ok_or_else(|| unexpected(COMMAND, "a size"))?;
        Ok(base.saturating_add(answer["plugged-memory"].as_u64().unwrap_or(0)))
    }

    /// The devices that have names, whether they were there from the start or not.
    ///
    /// # Errors
    /// If QEMU does not tell.
    pub async fn named_devices(&self) -> Result<Vec<String>, HypervisorError> {
        self.children("/machine/peripheral").await
    }

    /// The devices that were asked for without a name.
    ///
    /// # Errors
    /// If QEMU does not tell.
    pub async fn unnamed_devices(&self) -> Result<Vec<String>, HypervisorError> {
        self.children("/machine/peripheral-anon").await
    }

    /// Whether the kernel runs the guest (KVM), rather than QEMU alone.
    ///
    /// # Errors
    /// If QEMU does not tell.
    pub async fn uses_kvm(&self) -> Result<bool, HypervisorError> {
        Ok(self.ask("query-kvm").await?["enabled"] == true)
    }

    /// The types of VMs that this QEMU could make.
    ///
    /// # Errors
    /// If QEMU does not tell.
    pub async fn machine_types(&self) -> Result<Vec<MachineType>, HypervisorError> {
        const COMMAND: &str = "query-machines";
        let answer = self.ask(COMMAND).await?;
        let types = answer.as_array().ok_or_else(|| unexpected(COMMAND, "a list of types"))?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let read =
            |value: &Value| Some(MachineType { name: text(&value["name"])?, alias: text(&value["alias"]) });
        Ok(types.iter().filter_map(read).collect())
    }

    /// The models of processors that this QEMU could make here.
    ///
    /// # Errors
    /// If QEMU does not tell: not every architecture does.
    pub async fn processor_models(&self) -> Result<Vec<ProcessorModel>, HypervisorError> {
        const COMMAND: &str = "query-cpu-definitions";
        let answer = self.ask(COMMAND).await?;
        let models = answer.as_array().ok_or_else(|| unexpected(COMMAND, "a list of models"))?;
        Ok(models.iter().filter_map(read_model).collect())
    }

    async fn children(&self, path: &str) -> Result<Vec<String>, HypervisorError> {
        let answer = self.qmp().execute("qom-list", json!({ "path": path }), ANSWER_DEADLINE).await?;
        let properties = answer.as_array().ok_or_else(|| unexpected("qom-list", "a list of properties"))?;
        let children = properties
            .iter()
            .filter(|property| property["type"].as_str().is_some_and(|kind| kind.starts_with("child<")));
        Ok(children.filter_map(|child| child["name"].as_str().map(str::to_owned)).collect())
    }
}

fn read_model(model: &Value) -> Option<ProcessorModel> {
    let unavailable = model["unavailable-features"].as_array().map(Vec::as_slice).unwrap_or_default();
    let unavailable = unavailable.iter().filter_map(|feature| feature.as_str().map(str::to_owned)).collect();
    Some(ProcessorModel { name: model["name"].as_str()?.to_owned(), unavailable })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_has_what_this_host_lacks() {
        let model = json!({"name": "Haswell-v1", "unavailable-features": ["hle", 7, "rtm"], "typename": "x"});
        let read = read_model(&model).unwrap();
        assert_eq!(
            (read.name.as_str(), read.unavailable.as_slice()),
            ("Haswell-v1", &["hle".to_owned(), "rtm".to_owned()][..])
        );
        assert_eq!(read_model(&json!({"name": "qemu64"})).unwrap().unavailable, [""; 0]);
        assert_eq!(read_model(&json!({})), None);
    }
}
