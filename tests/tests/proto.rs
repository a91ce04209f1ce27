//! The committed protobuf code is what the committed `.proto` files generate.
//!
//! With `UPDATE_GENERATED=1` the test writes the files instead.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

#[test]
fn committed_code_is_generated_code() {
    let proto = Path::new(env!("CARGO_MANIFEST_DIR")).join("../proto");
    let sources = proto.join("proto");
    let committed = proto.join("src/gen");

    let files = ["auth.proto", "version.proto", "eventstream.proto"];
    let descriptors = protox::compile(files, [&sources]).expect("the .proto files compile");
    let mut config = prost_build::Config::new();
    config.btree_map(["."]).compile_well_known_types().disable_comments(["."]);
    let modules = descriptors
        .file
        .into_iter()
        .map(|file| (prost_build::Module::from_protobuf_package_name(file.package()), file))
        .collect();
    let generated: BTreeMap<String, String> = config
        .generate(modules)
        .expect("code generation")
        .into_iter()
        .map(|(module, code)| (module.to_file_name_or("_"), format!("{HEADER}{code}")))
        .collect();

    if std::env::var_os("UPDATE_GENERATED").is_some() {
        for (name, code) in &generated {
            fs::write(committed.join(name), code).expect("write generated code");
        }
    }
    let names: Vec<String> = fs::read_dir(&committed)
        .expect("proto/src/gen")
        .map(|entry| entry.expect("entry").file_name().into_string().expect("name"))
        .collect();
    assert_eq!(names.len(), generated.len(), "proto/src/gen holds {names:?}");
    for (name, code) in &generated {
        let found = fs::read_to_string(committed.join(name)).unwrap_or_default();
        assert!(found == *code, "{name} differs: run this test with UPDATE_GENERATED=1");
    }
}

const HEADER: &str = "// Generated from proto/proto by tests/tests/proto.rs. Do not edit.\n";
