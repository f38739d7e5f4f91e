//! The components of a VM, and the abilities of a QEMU: machine types, processor models.

use serde_json::{Value, json};

use super::process::{ANSWER_DEADLINE, Qemu, unexpected};
use crate::HypervisorError;

const TYPE_SUFFIX: &str = "-machine";

/// A machine type that a QEMU supports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineType {
    /// Its full name, with a version where it has one.
    pub name: String,
    /// A shorter name, with another meaning in another version of QEMU.
    pub alias: Option<String>,
}

/// A processor model that a QEMU supports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessorModel {
    /// The name of the model.
    pub name: String,
    /// The features that this host lacks, by QEMU's names.
    pub unavailable: Vec<String>,
}

impl Qemu {
    /// Returns the full name of the VM's machine type, whatever its name at the start.
    pub async fn machine_type(&self) -> Result<String, HypervisorError> {
        let arguments = json!({ "path": "/machine", "property": "type" });
        let answer = self.qmp().execute("qom-get", arguments, ANSWER_DEADLINE).await?;
        let name = answer.as_str().map(|name| name.strip_suffix(TYPE_SUFFIX).unwrap_or(name).to_owned());
        Ok(name.ok_or_else(|| unexpected("qom-get", "a type"))?)
    }

    /// Returns the present size of the guest's memory in bytes.
    pub async fn memory_bytes(&self) -> Result<u64, HypervisorError> {
        const COMMAND: &str = "query-memory-size-summary";
        let answer = self.ask(COMMAND).await?;
        let base = answer["base-memory"].as_u64().ok_or_else(|| unexpected(COMMAND, "a size"))?;
        Ok(base.saturating_add(answer["plugged-memory"].as_u64().unwrap_or(0)))
    }

    /// Returns the devices with names, present from the start or added later.
    pub async fn named_devices(&self) -> Result<Vec<String>, HypervisorError> {
        self.children("/machine/peripheral").await
    }

    /// Returns the devices that were made without a name.
    pub async fn unnamed_devices(&self) -> Result<Vec<String>, HypervisorError> {
        self.children("/machine/peripheral-anon").await
    }

    /// Returns whether the kernel runs the guest (KVM), rather than QEMU alone.
    pub async fn uses_kvm(&self) -> Result<bool, HypervisorError> {
        Ok(self.ask("query-kvm").await?["enabled"] == true)
    }

    /// Returns the machine types that this QEMU supports.
    pub async fn machine_types(&self) -> Result<Vec<MachineType>, HypervisorError> {
        const COMMAND: &str = "query-machines";
        let answer = self.ask(COMMAND).await?;
        let types = answer.as_array().ok_or_else(|| unexpected(COMMAND, "a list of types"))?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let read =
            |value: &Value| Some(MachineType { name: text(&value["name"])?, alias: text(&value["alias"]) });
        Ok(types.iter().filter_map(read).collect())
    }

    /// Returns the processor models that this QEMU supports here.
    ///
    /// # Errors
    /// If QEMU does not answer, as on some architectures.
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
