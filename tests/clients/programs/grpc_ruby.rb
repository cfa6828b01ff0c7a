# Debian's grpc for Ruby with stubs of its own generator: an answer, a stream, boxes, a status, a deadline, a cancellation.

require "grpc"
require "json"
require "tmpdir"
require "google/protobuf/well_known_types"
require "google/rpc/error_details_pb"
require "grpc/google_rpc_status_utils"

facts = JSON.parse(ARGV[0])
def check(holds, text)
  raise text unless holds
end

Dir.mktmpdir do |folder|
  files = Dir.glob("kestrel/v1/*.proto", base: facts["proto"])
  plugin = `which grpc_ruby_plugin`.strip
  system("protoc", "--proto_path=#{facts["proto"]}", "--proto_path=#{facts["google"]}", "--ruby_out=#{folder}",
         "--plugin=protoc-gen-grpc=#{plugin}", "--grpc_out=#{folder}", *files, exception: true)
  $LOAD_PATH.unshift(folder)
  require "kestrel/v1/vision_service_services_pb"

  vision = Kestrel::V1::VisionService::Stub.new(facts["grpc"], :this_channel_is_insecure)
  token = { "authorization" => "Bearer #{facts["alice"]}" }
  image = Kestrel::V1::Image.new(data: File.binread(facts["picture"]))
  sampling = Kestrel::V1::SamplingParams.new(temperature: 0)
  query = { question: "What is in this image?", image: image, sampling: sampling }

  whole = vision.complete_query(Kestrel::V1::CompleteQueryRequest.new(**query), metadata: token).result.answer
  check(whole.include?("star"), whole)
  puts "a whole answer"

  text = vision.query(Kestrel::V1::QueryRequest.new(**query), metadata: token).map { |message| message.delta ? message.delta.text : "" }.join
  check(text == whole, text)
  puts "a stream"

  found = vision.detect(Kestrel::V1::DetectRequest.new(object: "star", image: image), metadata: token).objects
  check(found.all? { |item| 0 <= item.box.x_min && item.box.x_max <= 1 }, found.inspect)
  puts "boxes"

  options = Kestrel::V1::RequestOptions.new(model: "gull")
  begin
    vision.detect(Kestrel::V1::DetectRequest.new(object: "star", image: image, options: options), metadata: token)
    raise "an unknown model was served"
  rescue GRPC::NotFound => error
    details = GRPC::GoogleRpcStatusUtils.extract_google_rpc_status(error.to_status).details
    reasons = details.select { |any| any.is(Google::Rpc::ErrorInfo) }.map { |any| any.unpack(Google::Rpc::ErrorInfo).reason }
    check(reasons == ["MODEL_NOT_FOUND"], reasons.inspect)
  end
  puts "statuses with details"

  long = Kestrel::V1::QueryRequest.new(question: "?", constraint: Kestrel::V1::Constraint.new(regex: "[a-z ]{900}"))
  begin
    vision.query(long, metadata: token, deadline: Time.now + 0.5).each {}
    raise "it did not end at its deadline"
  rescue GRPC::DeadlineExceeded
    puts "a deadline"
  end

  operation = vision.query(long, metadata: token, return_op: true)
  begin
    operation.execute.each { operation.cancel }
    raise "it was not cancelled"
  rescue GRPC::Cancelled
    puts "a cancellation"
  end
end
